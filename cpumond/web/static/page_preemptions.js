// Jobs that were stopped, for which pool or operation, and why.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { ask, textFilter } from "./filters.js";
import { amounts, number, time } from "./format.js";
import { currentQuery, to } from "./route.js";
import { badge, table } from "./table.js";

const KINDS = {
  preempted: ["preempted", "A pool or operation below its share needed the room"],
  limit_violated: ["over a limit", "Its operation or pool was above one of its limits"],
  overcommit: ["node overcommitted", "The jobs of its node might use more than the node has"],
  graceful: ["asked to end", "It was asked to end by itself, and has time for that"],
  aborted: ["aborted", "Its operation ended or somebody stopped it"],
};
const STEP = 100;
const MOST = 1000;

export const preemptions = {
  title: () => "Preemptions",
  async load(_, { signal, query: chosen }) {
    const limit = limitOf(chosen);
    const found = await get(`/preemptions${query({ pool: chosen.get("pool"), operation: chosen.get("operation"), limit })}`, { signal });
    return { ...found, limit };
  },
  view({ preemptions: records, counts, lost_core_seconds: lost, limit }, _, app) {
    const chosen = currentQuery();
    const isFiltered = Boolean(chosen.get("pool") || chosen.get("operation"));
    return [
      h("h1", "Preemptions"),
      h("p.muted.plain-text", "Jobs that were stopped before they had ended, the newest first. “For” is who got the room."),
      countCards(counts, lost, chosen.get("pool")),
      h("div.filters", { role: "search", "aria-label": "Filter the preemptions" },
        textFilter("pool", "Pool", "that lost or got the room", app, { type: "search", isWide: true }),
        textFilter("operation", "Operation", "id of one that lost or got it", app, { type: "search", isWide: true })),
      table({
        caption: "Preemptions, the newest first", rows: records, rowKey: (record) => `${record.at}-${record.job_id}-${record.kind}`,
        empty: isFiltered ? "None fits." : "No job was preempted since the start of the scheduler.", columns: COLUMNS,
      }),
      records.length >= limit && limit < MOST ? h("div",
        h("button", { type: "button", onclick: () => ask(app, { limit: String(Math.min(limit + 300, MOST)) }) }, "Show older ones")) : null,
    ];
  },
};

function limitOf(chosen) {
  const limit = Math.trunc(Number(chosen.get("limit")));
  return limit >= 1 && limit <= MOST ? limit : STEP;
}

function countCards(counts, lost, pool) {
  const known = Object.entries(counts);
  if (!known.length) return null;
  return h("section.card", { "aria-labelledby": "counts" },
    h("h2", { id: "counts" }, `Since the start of the scheduler${pool ? ` in pool ${pool}` : ""}`),
    h("div.cards", known.map(([kind, value]) => h("div", { key: kind, title: KINDS[kind]?.[1] },
      h("div.figure-number", number(value, 6)), h("div.figure-name", kindWord(kind)))),
    h("div", { key: "lost", title: "What these jobs had used since their start or their last checkpoint" },
      h("div.figure-number", number(lost / 3600, 4)), h("div.figure-name", "core-hours lost"))));
}

const kindWord = (kind) => KINDS[kind]?.[0] ?? kind.replaceAll("_", " ");

const operationLink = (id) => h("a.mono.id.short", { title: id, href: to("operations", id) }, id);
const poolLink = (tree, pool) => h("a", { href: to("pools", tree, pool) }, pool);

function forWhom(record) {
  if (!record.preemptor_operation_id) return "–";
  return h("span", operationLink(record.preemptor_operation_id), record.preemptor_pool ? [" ", poolLink(record.tree, record.preemptor_pool)] : null);
}

const COLUMNS = [
  { title: "When", cell: (r) => time(r.at) },
  { title: "Kind", cell: (r) => h("span", { title: KINDS[r.kind]?.[1] },
    badge(kindWord(r.kind), r.kind === "preempted" || r.kind === "overcommit" ? "warn" : "")) },
  { title: "Job", cell: (r) => h("a.mono.id.short", { title: r.job_id, href: to("operations", r.operation_id, "jobs", r.job_id) }, r.job_id) },
  { title: "Operation", cell: (r) => operationLink(r.operation_id) },
  { title: "Pool", cell: (r) => poolLink(r.tree, r.pool) },
  { title: "Node", cell: (r) => h("a", { href: to("nodes", r.node_id) }, r.node_id) },
  { title: "For", cell: forWhom },
  { title: "Why", cell: (r) => h("span.sentence", r.why, h("span.muted", ` (freed ${amounts(r.freed)})`)) },
  { title: "Lost", align: "right", cell: (r) => h("span", { title: "Core-hours that it has to do again" }, number((r.lost_core_seconds ?? 0) / 3600, 3)) },
];
