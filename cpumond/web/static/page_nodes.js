// All nodes: what each has, and what its jobs ordered, may use and use.

import { get, query, serverNow } from "./api.js";
import { PERIOD_MS } from "./app.js";
import { chosenColumns, columnMenu } from "./columns.js";
import { h } from "./dom.js";
import { ask } from "./filters.js";
import { amounts, columnCores, count, formatSpan } from "./format.js";
import { heatMap } from "./heat.js";
import { to } from "./route.js";
import { badge, bar, bigTable } from "./table.js";

const PAGE = 1000;
const PERIOD_OF_NODE_MS = 2; // thousands of nodes are megabytes

export const nodes = {
  title: () => "Nodes",
  async load(_, { signal, query: chosen }) {
    const tree = chosen.get("tree");
    const all = [];
    let cursor = null;
    do {
      const { nodes: some, next } = await get(`/nodes${query({ tree, limit: PAGE, cursor })}`, { signal });
      all.push(...some);
      cursor = next;
    } while (cursor);
    this.period = PERIOD_MS + all.length * PERIOD_OF_NODE_MS;
    return { list: all, tree };
  },
  view({ list, tree }, _, app) {
    const lost = list.filter(isLost).length;
    const silent = list.filter((node) => !node.is_online && !isLost(node)).length;
    const over = list.filter((node) => node.overcommitted_s !== null).length;
    const cordoned = list.filter((node) => node.cordon && !isLost(node)).length;
    const failing = list.filter((node) => node.failing).length;
    return [
      h("div.heading", h("h1", "Nodes"), h("span.muted", `${count(list.length - lost, "node")}${tree ? ` of tree ${tree}` : ""}`),
        tree ? h("button.choice", { type: "button", onclick: () => ask(app, { tree: null }) }, "Of all trees") : null,
        lost ? badge(`${lost} lost`, "bad") : null, silent ? badge(`${silent} silent`, "bad") : null, over ? badge(`${over} overcommitted`, "warn") : null,
        cordoned ? badge(`${cordoned} cordoned`, "warn") : null, failing ? badge(`${failing} failing`, "bad") : null),
      list.length ? heatMap(list, app) : null,
      bigTable("nodes", {
        caption: "Nodes", noun: "node", columns: chosenColumns("nodes", COLUMNS), tools: columnMenu("nodes", COLUMNS, app), rows: list, rowKey: (node) => node.id, rowClass: (node) => (isLost(node) ? "gone" : ""), sort: "id", height: "75vh",
        searchable: (node) => `${node.id} ${node.address} ${node.tree ?? ""} ${node.tags.join(" ")} ${nodeState(node)[0]}`,
        empty: tree ? `No node is in the tree ${tree}.` : "No node has registered yet: nodes register themselves when their agent runs.",
      }),
    ];
  },
};

// A node that was given up is kept for a day with the jobs that it had.
export const isLost = (node) => (node.lost_at ?? null) !== null;

// [words, tone]: whether it is online, cordoned, held off, overcommitted.
export function nodeState(node) {
  if (isLost(node)) return [`lost ${formatSpan(serverNow() - node.lost_at)} ago`, "bad"];
  if (!node.is_online) return [`silent for ${formatSpan(node.silent_s)}`, "bad"];
  if (node.cordon) return [node.cordon.drain && node.job_count + node.stopping_job_count ? "draining" : "cordoned", "warn"];
  if (node.failing) return [node.held_until ? `held off for ${formatSpan(Math.max(node.held_until - serverNow(), 0))}` : "jobs fail", "bad"];
  if (node.overcommitted_s !== null) return [`overcommitted for ${formatSpan(node.overcommitted_s)}`, "warn"];
  return ["online", "good"];
}

const taken = (node) => node.usage.cpu ?? 0;
const capacity = (node) => node.capacity.cpu ?? 0;
// Shown as "–" where the scheduler is older and does not send them.
const ordered = (node) => node.ordered_cores ?? null;
const used = (node) => node.used_cores ?? null;

const coresBar = (value, node, color) => (value === null ? "–" : bar(capacity(node) ? value / capacity(node) : 0, columnCores(value), { color }));

const COLUMNS = [
  { key: "id", width: 170, narrow: 130, title: "Node", value: (n) => n.id, cell: (n) => h("a", { href: to("nodes", n.id), title: n.id }, n.id) },
  { key: "state", shown: "always", width: 160, narrow: 116, title: "State", value: (n) => (n.is_online ? (n.overcommitted_s ?? -1) : 1e9 + n.silent_s),
    cell: (n) => h("span", { title: nodeState(n)[0] }, badge(...nodeState(n))) },
  { key: "used", shown: "always", width: 100, narrow: 102, title: "Used", help: "Cores that its jobs use; the bar: relative to its capacity", align: "right", value: used,
    cell: (n) => coresBar(used(n), n, "--c1") },
  { key: "limits", shown: "wide", width: 100, narrow: 102, title: "Limits", help: "Cores allocated to its jobs; the bar: relative to its capacity", align: "right", value: taken,
    cell: (n) => coresBar(taken(n), n, "--c2") },
  { key: "ordered", shown: "wide", width: 100, narrow: 102, title: "Requested", help: "Cores that its jobs request; the bar: relative to its capacity", align: "right", value: ordered,
    cell: (n) => coresBar(ordered(n), n, "--c7") },
  { key: "capacity", shown: "wide", width: 70, title: "Cores", help: "Its capacity", align: "right", value: capacity, cell: (n) => columnCores(capacity(n)) },
  { key: "free", shown: "wide", width: 70, title: "Free", help: "Cores that are allocated to no job; negative: overcommitted", align: "right",
    value: (n) => n.free.cpu ?? 0, cell: (n) => columnCores(n.free.cpu) },
  { key: "jobs", shown: "wide", width: 110, narrow: 102, title: "Jobs", align: "right", value: (n) => n.job_count,
    cell: (n) => `${n.job_count}${n.stopping_job_count ? ` + ${n.stopping_job_count} ending` : ""}` },
  { key: "tree", shown: "wide", width: 100, title: "Tree", value: (n) => n.tree ?? "",
    cell: (n) => (n.matched_trees.length ? badge(`${n.matched_trees.length} match`, "bad") : n.tree === null ? badge("none", "warn") : h("a", { href: to("pools", n.tree), title: n.tree }, n.tree)) },
  { key: "tags", shown: "wide", width: 160, title: "Tags", value: (n) => tagsOf(n), cell: (n) => h("span.long", { title: tagsOf(n) }, tagsOf(n) || "–") },
  { key: "memory", shown: "wide", width: 120, title: "Free memory", align: "right", value: (n) => n.free.memory ?? 0,
    cell: (n) => amounts({ memory: n.free.memory }).replace(" memory", "") },
  { key: "over", shown: "wide", width: 120, title: "Overcommits", help: "Number of times that it was overcommitted since the scheduler started", align: "right",
    value: (n) => n.overcommit_count },
];

const tagsOf = (node) => node.tags.filter((tag) => tag !== node.address).join(", ");
