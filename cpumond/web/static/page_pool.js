// One pool: its graphs over time, its options in force, its sub-pools and operations.

import { accessSection } from "./access.js";
import { poolActions } from "./actions.js";
import { get, orMissing, path, query } from "./api.js";
import { chart } from "./chart.js";
import { h } from "./dom.js";
import { eventsSection, readEvents } from "./events.js";
import { allAmounts, amounts, cores, duration, hasAny, isKnown, NONE, number, percent, share, time } from "./format.js";
import { idleSection } from "./idle.js";
import { axis, column, line, ofPoints, rangeButtons, readHistory, remember } from "./history.js";
import { CHANGES, OF_NODES, readMarks } from "./marks.js";
import { stateBadge } from "./page_operations.js";
import { EPHEMERAL, loadPoolTable, poolRows, poolTable, starvationBadge } from "./page_pools.js";
import { preemptionsTable } from "./page_preemptions.js";
import { readRights, ROOT } from "./rights.js";
import { currentQuery, setQuery, to } from "./route.js";
import { badge, choiceButtons, facts, operationLink, table } from "./table.js";
import { readWaste, wasteSection } from "./waste.js";

const MAX_OPERATIONS = 100;
const MAX_PREEMPTIONS = 20;
const SEEN_PART = 0.05;
const TABLE_PERIOD_MS = 4000; // the table of all pools is large where there are many
const LIVE = ["running", "pending"];

// [option, unit, where its value in force is in the answer of /orchid: by the same name, if none is given]
const OPTIONS = [
  ["weight"], ["mode"], ["fifo_sort_parameters"],
  ["strong_guarantee_resources", "resources", "effective_strong_guarantee_resources"],
  ["resource_limits", "resources"], ["max_share_ratio", "share"], ["max_running_operation_count"], ["max_operation_count"],
  ["integral_guarantees/guarantee_type", "", "integral_guarantee_type"],
  ["integral_guarantees/resource_flow", "resources", "specified_resource_flow"],
  ["integral_guarantees/burst_guarantee_resources", "resources", "specified_burst_guarantee_resources"],
  ["forbid_immediate_operations"], ["create_ephemeral_subpools"], ["set_container_cpu_limit"], ["retry_policy"], ["max_retry_memory"],
  ...[["fair_share_starvation_tolerance", "share"], ["fair_share_starvation_timeout", "ms"], ["min_share_preemption_timeout", "ms"],
    ["fair_share_aggressive_starvation_timeout", "ms"]].map(([option, unit]) => [option, unit, `effective_${option}`]),
  ["enable_aggressive_starvation", "", "effective_aggressive_starvation_enabled"], ["allow_aggressive_preemption", "", "effective_aggressive_preemption_allowed"],
  ...[["non_preemptible_resource_usage_threshold", "resources"], ["min_run_time", "ms"]].map(([option, unit]) => [option, unit, `effective_${option}`]),
  ["scheduling_tag_filter"],
];

export const pool = {
  async load({ tree, pool: name }, options) {
    const where = path`/trees/${tree}/pools/${name}`;
    const data = await get(where, options).catch(orMissing);
    if (data.missing) return data;
    const [orchid, idle, all, history, rights, events, holder, preemptions, marks, waste, ...operations] = await Promise.all([
      get(`${where}/orchid`, options), get(`${path`/trees/${tree}`}/why${query({ pool: data.parent === null ? "" : name })}`, options).catch(() => null), remember(`pools/${tree}`, TABLE_PERIOD_MS, () => loadPoolTable(tree)),
      readHistory({ kind: "pool", tree, name }), readRights(tree), readEvents({ tree, pool: data.parent === null ? "" : name }),
      data.parent === null ? get(path`/trees/${tree}`, options) : data,
      get(`/preemptions${query({ pool: name, limit: MAX_PREEMPTIONS })}`, options),
      readMarks({ tree, pool: data.parent === null ? "" : name }, ["preemption", CHANGES, ...(data.parent === null ? OF_NODES : [])]),
      readWaste({ tree, pool: data.name }),
      ...LIVE.map((state) => get(`/operations${query({ tree, pool: name, state, limit: MAX_OPERATIONS })}`, options)),
    ]);
    return { data, orchid, idle, rows: all.value ? poolRows(all.value) : [], totalCores: all.value?.total.cpu ?? 0, history, rights, events, holder, preemptions, marks, waste, operations };
  },

  view({ missing, data, orchid, idle, rows, totalCores, history, rights, events, holder, preemptions, marks, waste, operations }, { tree, pool: name }, app) {
    if (missing) return h("div.page", h("h1", name), h("p.error", { role: "alert" }, missing), h("p.flat", h("a", { href: to("pools", tree) }, `Pools of ${tree}`)));
    const row = rows.find((each) => each.name === data.name);
    return h("div.page",
      crumbs(data, rows),
      h("div.heading", h("h1", data.parent === null ? `Root pool of ${tree}` : data.name), badges(data, orchid), h("div.actions", poolActions(tree, data, app, rights))),
      h("section.card", { "aria-label": "At a glance" }, glance(data, orchid, row)),
      idle && (idle.causes.length || data.parent === null) ? idleSection(idle, app) : null,
      h("div.heading", h("h2", "Over time"), rangeButtons(app)),
      graphs(history, marks, typeOf(orchid, row), orchid, row, app),
      childrenSection(data, rows, totalCores, app),
      operationsSection(data, operations),
      preemptionsSection(data, preemptions),
      wasteSection(waste),
      eventsSection(events, rights, app),
      data.is_ephemeral ? null : accessSection(holder, tree, data.name, app),
      attributesSection(data, orchid));
  },

  title: ({ tree, pool: name }) => (name === ROOT ? `Root pool of ${tree}` : `Pool ${name}`),
};

function crumbs(data, rows) {
  const byName = new Map(rows.map((row) => [row.name, row]));
  const above = [];
  for (let name = data.parent; name !== null && name !== undefined && above.length < 100; name = byName.get(name)?.parent) above.unshift(name);
  return h("nav.crumbs", { "aria-label": "Where this pool is" },
    h("span", h("a", { href: to("pools", data.tree) }, `Pools of ${data.tree}`)),
    above.map((name) => h("span", { key: name }, h("a", { href: to("pools", data.tree, name) }, name))),
    h("span", { "aria-current": "page" }, data.name));
}

function badges(data, orchid) {
  const type = typeOf(orchid);
  const starves = starvationBadge(data.starvation_status);
  return [
    starves ? h("span", { key: "starving", title: orchid.starving_since ? `since ${orchid.starving_since}` : null }, starves) : null,
    !starves && data.starves_in_s !== null ? h("span", { key: "soon" }, badge(`starves in ${duration(data.starves_in_s)}`, "warn")) : null,
    data.budget && data.budget.level !== "within" ? h("span", { key: "budget", title: data.budget.text }, badge(data.budget.level === "spent" ? "budget spent" : "budget low", "warn")) : null,
    h("span", { key: "mode" }, badge(data.mode.replace("_", " "))),
    type !== "none" ? h("span", { key: "type" }, badge(`integral: ${type}`)) : null,
    data.is_ephemeral ? h("span", { key: "ephemeral", title: EPHEMERAL }, badge("ephemeral")) : null,
  ];
}

function glance(data, orchid, row) {
  const both = (absolute, ratio, resource) => `${absolute}: ${share(ratio, resource)} of the tree`;
  const used = `${cores(data.cpu_seconds / 3600)} core-hours used`;
  const reclaimed = data.reclaimed_cpu_seconds ? `, ${cores(data.reclaimed_cpu_seconds / 3600)} reclaimed` : "";
  return facts([
    ["Fair share", both(amounts(data.fair_share), data.fair_share_ratio, data.fair_share_resource)],
    ["Allocated", both(amounts(data.usage), data.usage_ratio, data.usage_resource)],
    ["Demand", both(amounts(data.demand), orchid.demand_ratio ?? row?.demand_ratio, row?.demand_resource)],
    data.waiting && hasAny(data.waiting) ? ["Waiting", `${amounts(data.waiting)}, demanded by operations that are not running`] : null,
    data.state_text ? ["Starving", data.state_text] : null,
    data.budget ? ["Budget", data.budget.text] : null,
    ["Strong guarantee", hasAny(data.strong_guarantee) ? both(amounts(data.strong_guarantee), orchid.min_share_ratio ?? row?.strong_guarantee_ratio, row?.strong_guarantee_resource) : "none"],
    typeOf(orchid, row) === "none" ? null : ["Integral guarantee", integralText(typeOf(orchid, row), orchid)],
    data.parent === null ? null : ["Weight", data.weight === null ? `not set, ${number(orchid.weight ?? 1)} by default` : number(data.weight)],
    ["Limits", hasAny(data.limits) ? amounts(data.limits) : "none of its own"],
    ["Operations running", `${number(data.running_operation_count, 9)} of at most ${number(data.max_running_operation_count, 9)}`],
    ["Operations in total", `${number(data.operation_count, 9)} of at most ${number(data.max_operation_count, 9)}`],
    row ? ["CPU of its jobs", `${cores(row.ordered_cores)} cores requested, ${cores(row.limit_cores)} allocated, ${cores(row.used_cores)} used`] : null,
    ["CPU time since the scheduler started", used + reclaimed],
    data.is_ephemeral && data.owner ? ["Created for", data.owner] : null,
  ]);
}

function integralText(type, orchid) {
  const burst = hasAny(orchid.specified_burst_guarantee_resources) ? `, burst of ${amounts(orchid.specified_burst_guarantee_resources)}` : "";
  return `${type}: flow of ${amounts(orchid.specified_resource_flow)}${burst}`;
}

// --- graphs ----------------------------------------------------------------------------------------------------------

const typeOf = (orchid, row) => orchid.integral_guarantee_type ?? row?.integral_type ?? "none";

function graphs(history, marks, type, orchid, row, app) {
  const fine = ofPoints(history);
  const [shared, all] = [fine, history].map((each) => ({ ...axis(each, marks), height: 230 }));
  if (type !== "none") return h("div.grid2.three", shareGraph(shared, fine), volumeGraph(shared, fine, type, orchid, row, app), coresGraph(all, history));
  return h("div.part", h("div.grid2", shareGraph(shared, fine), coresGraph(all, history)),
    h("p.muted.flat", "This pool has no integral guarantee, so it accumulates no volume."));
}

const shareGraph = (shared, history) => h("section.card", { key: "graph-share", "aria-label": "Allocated, demand and guarantee" }, chart("share", {
  title: "Allocated and demand against the guarantee, percent of the tree",
  ...shared, format: percent,
  series: [
    line(history, "usage_ratio", "allocated", "--c1", { fill: true }), line(history, "demand_ratio", "demand", "--c3"),
    line(history, "fair_share_ratio", "fair share", "--c2", { step: true }), line(history, "guarantee_ratio", "guarantee", "--c4", { dash: true }),
  ],
}));

function volumeGraph(shared, history, type, orchid, row, app) {
  const isAlone = isVolumeAlone(history);
  return h("section.card", { key: "graph-volume", "aria-label": "Accumulated volume" },
    chart("volume", {
      title: "Accumulated volume against its capacity, share-seconds",
      ...shared, format: number,
      series: [line(history, "volume", "volume", "--c5", { fill: true }), line(history, "capacity", "capacity", "--c7", { dash: true, hidden: isAlone })],
    }),
    choiceButtons("What the graph of the volume shows", [["capacity", "Volume and capacity"], ["alone", "Volume only"]], isAlone ? "alone" : "capacity",
      (value) => { setQuery({ volume: value }); app.redraw(); }),
    h("p.muted.flat", volumeSentence(type, orchid, row)));
}

// Whether the volume is drawn without its capacity: beside one far above it no change of the volume could be seen.
function isVolumeAlone(history) {
  const chosen = currentQuery().get("volume");
  if (chosen) return chosen === "alone";
  const greatest = (name) => column(history, name).reduce((most, value) => Math.max(most, value ?? 0), 0);
  return history.times.length > 0 && greatest("volume") < SEEN_PART * greatest("capacity");
}

function volumeSentence(type, orchid, row) {
  const volume = row?.volume ?? orchid.accumulated_resource_ratio_volume;
  const capacity = row?.capacity ?? orchid.integral_pool_capacity;
  if (volume === null || volume === undefined) return "A share-second is one percent of the tree for 100 seconds.";
  const filled = capacity > 0 ? ` of ${number(capacity)} (${percent(volume / capacity)})` : "";
  const flow = orchid.specified_resource_flow_ratio;
  const absolute = orchid.accumulated_resource_volume?.cpu;
  const parts = [
    `Now ${number(volume)}${filled} share-seconds${absolute === undefined ? "" : `, ${cores(absolute / 3600)} core-hours`}.`,
    flow === undefined ? "" : `It fills with ${percent(flow)} of the tree (${amounts(orchid.specified_resource_flow)}).`,
  ];
  if (type === "burst") {
    const lasts = orchid.estimated_burst_usage_duration_seconds;
    parts.push(`At its burst guarantee of ${percent(orchid.specified_burst_ratio)} it lasts ${lasts === undefined ? "forever" : duration(lasts)}.`);
  } else parts.push("While it lasts, it raises the guarantee above the flow.");
  parts.push("A share-second: all of the tree for one second.");
  return parts.filter(Boolean).join(" ");
}

const coresGraph = (shared, history) => h("section.card", { key: "graph-cores", "aria-label": "CPU" }, chart("cores", {
  title: "CPU of its jobs, cores",
  ...shared, format: cores,
  series: [
    line(history, "used_cores", "used", "--c1", { fill: true }), line(history, "limit_cores", "limits", "--c2", { step: true }),
    line(history, "ordered_cores", "requested", "--c7", { dash: true }), line(history, "reclaimed_cores", "reclaimed", "--c3"),
    line(history, "waiting_cores", "waiting", "--c4", { dash: true }), line(history, "held_cores", "idle while work waits", "--c5"),
  ],
}));

// --- what is below and in it -----------------------------------------------------------------------------------------

function childrenSection(data, rows, totalCores, app) {
  if (!data.children.length) return null;
  const children = rows.filter((row) => row.parent === data.name);
  return h("section.part", { key: "children", "aria-labelledby": "children-title" }, h("h2", { id: "children-title" }, "Sub-pools"),
    poolTable(`children-${data.tree}-${data.name}`, children, app, totalCores, {
      caption: `Pools in ${data.name}`, prefix: "child-", height: "420px", empty: "None.",
    }));
}

const OPERATION_COLUMNS = [
  { title: "Operation", cell: ({ operation }) => operationLink(operation.id, operation.title || operation.alias) },
  { title: "State", cell: ({ operation }) => stateBadge(operation) },
  { title: "User", cell: ({ operation }) => h("span.long", { title: operation.user }, operation.user) },
  { title: "Started", cell: ({ operation }) => time(operation.start_time) },
  { title: "Jobs", help: "active jobs, and those yet to start", align: "right", cell: ({ operation }) =>
    `${number(operation.jobs.active, 9)}${operation.jobs.pending ? ` + ${number(operation.jobs.pending, 9)} wait` : ""}` },
  { title: "Fair share", align: "right", help: "percent of the tree", cell: ({ here }) => share(here?.fair_share_ratio, here?.fair_share_resource) },
  { title: "Allocated", align: "right", help: "percent of the tree", cell: ({ here }) => share(here?.usage_ratio, here?.usage_resource) },
  { title: "Starving", cell: ({ operation, here }) => [
    starvationBadge(here?.starvation_status) ?? h("span.muted", here?.queue_place ? `waits, place ${number(here.queue_place, 9)}` : "no"), " ",
    h("a", { href: to("operations", operation.id), "aria-label": `Why: ${operation.title || operation.id}` }, "why")] },
];

function operationsSection(data, answers) {
  const total = answers.reduce((all, answer) => all + answer.total, 0);
  // An operation that began to run between the two requests is in both answers.
  const known = new Map(answers.flatMap((answer) => answer.operations).map((operation) => [operation.id, operation]));
  const rows = [...known.values()].slice(0, MAX_OPERATIONS).map((operation) => ({ operation, here: operation.trees[data.tree] }));
  const inside = data.operation_count - total;
  return h("section.part", { key: "operations", "aria-labelledby": "operations-title" },
    h("div.heading", h("h2", { id: "operations-title" }, "Operations directly in this pool"),
      h("a", { href: to("operations", { tree: data.tree, pool: data.name }) }, "all, including ended ones")),
    table({
      caption: `Running and pending operations directly in ${data.name}`, columns: OPERATION_COLUMNS, rows, rowKey: ({ operation }) => operation.id,
      empty: inside > 0 ? "None; the operations counted above are in sub-pools." : "No operation runs or waits here.",
    }),
    total > rows.length ? h("p.muted.flat", `The first ${rows.length} of ${number(total, 9)}.`) : null);
}

function preemptionsSection(data, answer) {
  const list = answer.preemptions.filter((record) => record.tree === data.tree);
  return h("section.part", { key: "preemptions", "aria-labelledby": "preemptions-title" },
    h("div.heading", h("h2", { id: "preemptions-title" }, "Preemptions in or for this pool"),
      h("a", { href: to("preemptions", { pool: data.name }) }, "all")),
    preemptionsTable("Jobs that were stopped in this pool or for this pool", list, answer.titles, { empty: "None on record.", without: ["Job", "Node", "Lost"] }));
}

// --- attributes ------------------------------------------------------------------------------------------------------

const at = (attributes, option) => option.split("/").reduce((value, name) => value?.[name], attributes);

function attributesSection(data, orchid) {
  const rows = OPTIONS.map(([option, unit = "", name = option]) => ({ option, unit, own: at(data.attributes, option), inForce: orchid[name] }))
    .filter(({ own, inForce }) => own !== undefined || isTold(inForce));
  return h("section.card", { key: "attributes", "aria-labelledby": "attributes-title" }, h("h2", { id: "attributes-title" }, "Attributes"),
    table({
      caption: "Options of the pool: set here, and in force", rows, rowKey: ({ option }) => option, empty: "None.", stacked: true,
      columns: [
        { title: "Option", cell: ({ option }) => h("code", option) },
        { title: "Set here", cell: ({ own, unit }) => (own === undefined ? h("span.muted", "not set") : formatValue(own, unit)) },
        { title: "In force", help: "including values from the tree and the pools above, and defaults", cell: ({ inForce, unit }) => (isTold(inForce) ? formatValue(inForce, unit, amounts) : NONE) },
      ],
    }),
    h("details", { key: "set" }, h("summary", "All that is set here, as JSON"),
      Object.keys(data.attributes).length ? h("pre", { tabindex: "0" }, JSON.stringify(data.attributes, null, 2)) : h("p.muted.flat", "Nothing is set: all options are inherited or defaults.")),
    h("details", { key: "all" }, h("summary", "All computed values, by YTsaurus' names"), h("pre", { tabindex: "0" }, JSON.stringify(orchid, null, 2))));
}

const isTold = (value) => isKnown(value) && !(typeof value === "object" && !Array.isArray(value) && !hasAny(value));

// `resources` shows those of a value: in force without those of 0, such as those that the tree does not have.
function formatValue(value, unit, resources = allAmounts) {
  if (unit === "ms" && typeof value === "number") return `${duration(value / 1000)}`;
  if (unit === "share" && typeof value === "number") return percent(value);
  if (unit === "resources" && typeof value === "object") return resources(value) || "nothing";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value, 9) : String(value);
}
