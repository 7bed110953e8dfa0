// The pools of a tree below each other.

import { get, orMissing, path } from "./api.js";
import { poolsActions } from "./actions.js";
import { chosenColumns, columnMenu, sameColumns } from "./columns.js";
import { h } from "./dom.js";
import { columnCores, cores, count, number, percent, share, short, time } from "./format.js";
import { chosenUnit, glanceCell, legend, unitSwitch } from "./glance.js";
import { loadTrees, readRights } from "./rights.js";
import { to } from "./route.js";
import { badge, bar, bigTable } from "./table.js";
import { trendCell, trendVersion, wantTrends } from "./trends.js";

const HELD = 0.005; // fewer cores are shown as 0

export const EPHEMERAL = "ephemeral: made by itself for its operations, gone with the last of them";

const made = new WeakMap(); // an answer -> its rows; the same answer (304) has the same rows

export const loadPoolTable = (tree, options) => get(`${path`/trees/${tree}`}/pool_table`, options);

// Objects of the rows of an answer of /pool_table: {name, parent, ..., tree}.
export function poolRows(answer) {
  let rows = made.get(answer);
  if (!rows) {
    rows = answer.rows.map((values) => {
      const row = { tree: answer.tree };
      for (let index = 0; index < values.length; index += 1) row[answer.columns[index]] = values[index];
      return row;
    });
    made.set(answer, rows);
  }
  return rows;
}

export const starvationBadge = (status) => (status === "aggressively_starving" ? badge("aggressively starving", "bad") : status === "starving" ? badge("starving", "warn") : null);

const most = (value, limit) => `${short(value)} / ${short(limit)}`;

function nameCell(row) {
  const link = h("a", { href: to("pools", row.tree, row.name), title: row.name }, row.name);
  const isStarving = starvationBadge(row.starvation) !== null;
  const isHeld = row.held_cores >= HELD;
  if (!row.is_ephemeral && !isStarving && !isHeld) return link;
  return h("span",
    isHeld ? h("span.held", { title: `${cores(row.held_cores)} idle cores that its operations wait for`, "aria-hidden": "true" }, "◔ ") : null,
    isStarving ? h("span.starves", { title: row.starvation.replaceAll("_", " "), "aria-hidden": "true" }, "⚠ ") : null,
    row.is_ephemeral ? h("span.muted", { title: EPHEMERAL, "aria-hidden": "true" }, "◌ ") : null, link,
    row.is_ephemeral ? h("span.hidden-text", ", ephemeral") : null);
}

const guaranteeText = (row) => [row.strong_guarantee_ratio && share(row.strong_guarantee_ratio, row.strong_guarantee_resource), row.flow_ratio && `flow ${percent(row.flow_ratio)}`]
  .filter(Boolean).join(" + ") || "–";

const integralText = ({ integral_type: type }) => (type === "none" ? "" : type ?? "");

function volumeCell(row) {
  if (row.volume === null || row.volume === undefined) return "–";
  const filled = row.capacity ? row.volume / row.capacity : 0;
  return h("span", { title: `${number(row.volume)} of ${number(row.capacity)} share-seconds` }, bar(filled, percent(filled), { color: "--c5" }));
}

// An amount is text in the chosen unit above a bar of all that the tree has.
function makeColumns(unit, totalCores) {
  const amount = unit === "cores" ? columnCores : (_, ratio, resource) => share(ratio, resource);
  const all = unit === "cores" ? "cores; the bar: of the tree" : "percent of the tree";
  const ratioBar = (value, ratio, resource, options) => bar(ratio ?? 0, amount(value, ratio, resource), options);
  const size = unit === "cores" ? { width: 100, narrow: 76 } : { width: 160, narrow: 140 };
  return [
    { key: "name", width: 236, narrow: 134, title: "Pool", value: (row) => row.name, cell: nameCell, isText: true },
    { key: "cpu", shown: "always", width: 318, narrow: 210, title: "Used / allocated / wanted", help: `CPU usage of its jobs, CPU allocated to them, and CPU that its operations want, ${unit === "cores" ? "cores" : all}, including waiting ones`,
      value: (row) => row.used_cores, descends: true, cell: (row) => glanceCell(row, unit, totalCores) },
    { key: "trend", shown: "wide", width: 106, title: "Last hour", help: "allocated CPU in the last hour, from 0 to its maximum", cell: trendCell },
    { key: "fair_share", shown: "wide", ...size, title: "Fair share", help: `the share that it is entitled to now, ${all}`, align: "right",
      value: (row) => row.fair_share_ratio, cell: (row) => ratioBar(row.fair_share_cores, row.fair_share_ratio, row.fair_share_resource, { color: "--c2" }) },
    { key: "usage", shown: "wide", ...size, title: "Allocated", help: `resources that its running jobs hold, ${all}; the line in the bar is its fair share`, align: "right",
      value: (row) => row.usage_ratio, cell: (row) => ratioBar(row.limit_cores, row.usage_ratio, row.usage_resource, { mark: row.fair_share_ratio }) },
    { key: "demand", shown: "wide", ...size, title: "Demand", help: `what its operations want, ${all}`, align: "right",
      value: (row) => row.demand_ratio, cell: (row) => ratioBar(row.demand_cores, row.demand_ratio, row.demand_resource, { color: "--c3" }) },
    { key: "guarantee", shown: "wide", width: size.width + 12, title: "Guarantee", help: `strong guarantee, and the resource flow of an integral one; ${unit === "cores" ? "cores" : all}`, align: "right",
      value: (row) => (row.strong_guarantee_ratio ?? 0) + (row.flow_ratio ?? 0), cell: (row) => (unit === "cores" ? columnCores(row.guarantee_cores || null) : guaranteeText(row)) },
    { key: "weight", shown: "wide", width: 76, title: "Weight", help: "how much it counts among its siblings; – : not set", align: "right", value: (row) => row.weight, cell: (row) => number(row.weight) },
    { key: "running", shown: "wide", width: 118, title: "Running / max", help: "operations that run, and how many may", align: "right",
      value: (row) => row.running_operation_count, cell: (row) => most(row.running_operation_count, row.max_running_operation_count) },
    { key: "held", shown: "wide", width: 98, title: "Idle, waited for", help: "idle cores that its operations wait for; see the pool's page", align: "right",
      value: (row) => row.held_cores, cell: (row) => (row.held_cores >= HELD ? badge(amount(row.held_cores, totalCores ? row.held_cores / totalCores : 0), "warn") : h("span.muted", "–")) },
    { key: "starvation", width: 178, title: "Starving", help: "below its fair share for longer than its time-out", value: (row) => row.starvation || null,
      cell: (row) => starvationBadge(row.starvation) ?? h("span.muted", "no") },
    { key: "operations", width: 126, title: "All / max", help: "operations that run or wait, and their maximum", align: "right",
      value: (row) => row.operation_count, cell: (row) => most(row.operation_count, row.max_operation_count) },
    { key: "integral", width: 88, title: "Integral", help: "type of its integral guarantee", value: integralText, cell: (row) => integralText(row) || h("span.muted", "none"), isText: true },
    { key: "volume", width: 100, title: "Volume", help: "volume of an integral pool, percent of its capacity", align: "right",
      value: (row) => (row.volume === null || row.volume === undefined ? null : row.volume / (row.capacity || 1)), cell: volumeCell },
    { key: "ordered", width: 92, title: "Requested", help: "cores that its jobs request (cpu_limit)", align: "right", value: (row) => row.ordered_cores, cell: (row) => columnCores(row.ordered_cores) },
    { key: "limit", width: 72, title: "Limits", help: "sum of the current limits of its jobs", align: "right", value: (row) => row.limit_cores, cell: (row) => columnCores(row.limit_cores) },
    { key: "used", width: 72, title: "Used", help: "cores that its jobs use", align: "right", value: (row) => row.used_cores, cell: (row) => columnCores(row.used_cores) },
    { key: "waiting", width: 84, title: "Waiting", help: "demand of operations that are not running", align: "right", value: (row) => row.waiting_cores, cell: (row) => columnCores(row.waiting_cores) },
    { key: "mode", width: 98, title: "Mode", help: "fair_share: its children share; fifo: one after the other", value: (row) => row.mode, isText: true },
  ];
}

// Pools of a tree that has `totalCores`, with a choice of unit and columns.
export function poolTable(key, rows, app, totalCores, more) {
  const unit = chosenUnit();
  const all = sameColumns(`pools ${unit} ${totalCores}`, () => makeColumns(unit, totalCores));
  const tree = rows[0]?.tree;
  return h("div.part", legend(), bigTable(key, {
    columns: chosenColumns("pools", all), rows, rowKey: (row) => row.name, searchable: (row) => row.name, noun: "pool",
    tools: [unitSwitch(app), columnMenu("pools", all, app)], version: trendVersion(), onrows: (shown) => wantTrends(tree, shown, app), ...more,
  }));
}

export const pools = {
  async load({ tree }, options) {
    const list = await loadTrees(options);
    const name = tree ?? (list.default_tree || list.trees[0]?.name);
    if (name === undefined) return { list };
    const found = await Promise.all([loadPoolTable(name, options), readRights(name)]).then(([answer, rights]) => ({ answer, rights }), orMissing);
    return { list, name, ...found };
  },

  view({ list, name, answer, rights, missing }, params, app) {
    if (name === undefined) return h("div.page", h("div.heading", h("h1", "Pools")), h("p.note", "There is no pool tree yet. Make one with ", h("code", "cpumond tree create NAME"), "."));
    if (missing) return h("div.page", h("div.heading", h("h1", "Pools"), treeSelector(list, name)), h("p.error", { role: "alert" }, missing));
    const tree = list.trees.find((each) => each.name === name);
    const rows = poolRows(answer);
    return h("div.page",
      h("div.heading", h("h1", "Pools"), treeSelector(list, name), h("div.actions", h("a.button", { href: to("guarantees", name) }, "Try guarantees"), poolsActions(name, app, rights))),
      tree?.errors.length ? h("p.note", "Errors that the last update tolerated: ", tree.errors.join("; ")) : null,
      poolTable(`pools-${name}`, rows, app, answer.total.cpu ?? 0, {
        caption: `Pools of the tree ${name}`, parentKey: (row) => row.parent, height: "max(340px, calc(100vh - 250px))", empty: "No pools.",
      }),
      h("p.muted", `As of ${time(answer.at)}. Percentages are of the whole tree ${name}: ${totals(answer.total)}.${rows.some((row) => row.is_ephemeral) ? ` ◌ is ${EPHEMERAL}.` : ""}${rows.some((row) => row.held_cores >= HELD) ? " ◔: CPU is idle that its operations wait for; see its page." : ""}`));
  },

  title: ({ tree }) => (tree ? `Pools of ${tree}` : "Pools"),
};

const totals = ({ cpu = 0, gpu, user_slots: slots }) => [`${cores(cpu)} cores`, gpu && count(gpu, "GPU"), slots && count(slots, "slot")].filter(Boolean).join(", ");

function treeSelector(list, name) {
  const isKnown = list.trees.some((tree) => tree.name === name);
  if (list.trees.length < 2 && isKnown) return h("span.muted", `of the tree ${name}`);
  return h("label.tree-selector", h("span", "of the tree"), " ",
    h("select", { value: name, onchange: (event) => { location.hash = to("pools", event.target.value); } },
      isKnown ? null : h("option", { key: name, value: name }, name),
      list.trees.map((tree) => h("option", { key: tree.name, value: tree.name }, tree.is_default ? `${tree.name} (default)` : tree.name))));
}
