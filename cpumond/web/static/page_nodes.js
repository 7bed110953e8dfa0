// All nodes: what each has, and what its jobs ordered, may use and use.

import { get, query, serverNow } from "./api.js";
import { h } from "./dom.js";
import { amounts, cores, count } from "./format.js";
import { showSpan } from "./job_words.js";
import { to } from "./route.js";
import { badge, bar, bigTable } from "./table.js";

const PAGE = 1000;

export const nodes = {
  title: () => "Nodes",
  async load(_, { signal }) {
    const list = await get(`/nodes${query({ limit: PAGE })}`, { signal });
    const all = list.nodes.slice();
    while (all.length < list.total) {
      const next = (await get(`/nodes${query({ limit: PAGE, offset: all.length })}`, { signal })).nodes;
      if (!next.length) break;
      all.push(...next);
    }
    return all;
  },
  view(list) {
    const lost = list.filter(isLost).length;
    const silent = list.filter((node) => !node.is_online && !isLost(node)).length;
    const over = list.filter((node) => node.overcommitted_s !== null).length;
    const cordoned = list.filter((node) => node.cordon && !isLost(node)).length;
    return [
      h("div.heading", h("h1", "Nodes"), h("span.muted", count(list.length - lost, "node")),
        lost ? badge(`${lost} lost`, "bad") : null, silent ? badge(`${silent} silent`, "bad") : null, over ? badge(`${over} overcommitted`, "warn") : null,
        cordoned ? badge(`${cordoned} cordoned`, "warn") : null),
      bigTable("nodes", {
        caption: "Nodes", noun: "node", columns: COLUMNS, rows: list, rowKey: (node) => node.id, rowClass: (node) => (isLost(node) ? "gone" : ""), sort: "id", height: "75vh",
        searchable: (node) => `${node.id} ${node.address} ${node.tree ?? ""} ${node.tags.join(" ")} ${nodeState(node)[0]}`,
        empty: "No node has registered yet: nodes register themselves when their agent runs.",
      }),
    ];
  },
};

// A node that was given up is kept for a day with the jobs that it had.
export const isLost = (node) => (node.lost_at ?? null) !== null;

// [words, tone]: whether it is online, cordoned, overcommitted.
export function nodeState(node) {
  if (isLost(node)) return [`lost ${showSpan(serverNow() - node.lost_at)} ago`, "bad"];
  if (!node.is_online) return [`silent for ${showSpan(node.silent_s)}`, "bad"];
  if (node.cordon) return [node.cordon.drain && node.job_count + node.stopping_job_count ? "draining" : "cordoned", "warn"];
  if (node.overcommitted_s !== null) return [`overcommitted for ${showSpan(node.overcommitted_s)}`, "warn"];
  return ["online", "good"];
}

const taken = (node) => node.usage.cpu ?? 0;
const capacity = (node) => node.capacity.cpu ?? 0;
// Shown as "–" where the scheduler is older and does not send them.
const ordered = (node) => node.ordered_cores ?? null;
const used = (node) => node.used_cores ?? null;

function coresBar(value, node, color) {
  return value === null ? "–" : bar(capacity(node) ? value / capacity(node) : 0, cores(value), { color });
}

const COLUMNS = [
  { key: "id", title: "Node", value: (n) => n.id, cell: (n) => h("a", { href: to("nodes", n.id) }, n.id) },
  { key: "state", title: "State", value: (n) => (n.is_online ? (n.overcommitted_s ?? -1) : 1e9 + n.silent_s), cell: (n) => badge(...nodeState(n)) },
  { key: "tree", title: "Tree", value: (n) => n.tree ?? "",
    cell: (n) => (n.matched_trees.length ? badge(`${n.matched_trees.length} fit`, "bad") : n.tree === null ? badge("none", "warn") : h("a", { href: to("pools", n.tree) }, n.tree)) },
  { key: "capacity", title: "Cores", help: "What it has", align: "right", value: capacity, cell: (n) => cores(capacity(n)) },
  { key: "ordered", title: "Ordered", help: "Cores that its jobs ordered; the bar: of what the node has", align: "right", value: ordered,
    cell: (n) => coresBar(ordered(n), n, "--c7") },
  { key: "limits", title: "Limits", help: "Cores that its jobs may use now; the bar: of what the node has", align: "right", value: taken,
    cell: (n) => coresBar(taken(n), n, "--c2") },
  { key: "used", title: "Used", help: "Cores that its jobs use; the bar: of what the node has", align: "right", value: used,
    cell: (n) => coresBar(used(n), n, "--c1") },
  { key: "free", title: "Free", help: "Cores that no job's limit takes; negative: overcommitted", align: "right",
    value: (n) => n.free.cpu ?? 0, cell: (n) => cores(n.free.cpu) },
  { key: "memory", title: "Free memory", align: "right", value: (n) => n.free.memory ?? 0,
    cell: (n) => amounts({ memory: n.free.memory }).replace(" memory", "") },
  { key: "jobs", title: "Jobs", align: "right", value: (n) => n.job_count,
    cell: (n) => `${n.job_count}${n.stopping_job_count ? ` + ${n.stopping_job_count} ending` : ""}` },
  { key: "over", title: "Overcommits", help: "How often it was overcommitted since the start of the scheduler", align: "right",
    value: (n) => n.overcommit_count },
  { key: "tags", title: "Tags", value: (n) => tagsOf(n), cell: (n) => h("span.long", { title: tagsOf(n) }, tagsOf(n) || "–") },
];

const tagsOf = (node) => node.tags.filter((tag) => tag !== node.address).join(", ");
