// Jobs that were stopped, for which pool or operation, and why.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { ask, textFilter } from "./filters.js";
import { amount, amounts, count, hours as coreHours, number, time, withoutIds } from "./format.js";
import { currentQuery, to } from "./route.js";
import { badge, chosenFold, folds, operationLink, table } from "./table.js";

const KINDS = {
  preempted: ["preempted", "A pool or operation below its share needed the resources"],
  limit_violated: ["over a limit", "Its operation or pool was above one of its limits"],
  overcommit: ["node overcommitted", "The limits of the jobs on its node exceeded the capacity"],
  graceful: ["asked to end", "It was asked to end by itself within a time-out"],
  aborted: ["aborted", "Its operation ended, or a user stopped it"],
};
const STEP = 100;
const MOST = 1000;
const MOST_POOLS = 3;
const IN_A_GROUP = 20;

export const preemptions = {
  title: () => "Preemptions",
  async load(_, { signal, query: chosen }) {
    const [limit, open] = [limitOf(chosen), chosenFold()];
    const asked = { pool: chosen.get("pool"), operation: chosen.get("operation") };
    const [found, groups, inside] = await Promise.all([
      get(`/preemptions${query({ ...asked, limit })}`, { signal }), get(`/preemption_groups${query(asked)}`, { signal }),
      open ? get(`/preemptions${query({ ...asked, group: open, limit: IN_A_GROUP })}`, { signal }) : null]);
    return { ...found, limit, groups, inside, open };
  },
  view({ preemptions: records, limit, titles, groups, inside, open }, _, app) {
    const chosen = currentQuery();
    const isFiltered = Boolean(chosen.get("pool") || chosen.get("operation"));
    return [
      h("h1", "Preemptions"),
      h("p.muted.plain-text", "Jobs that were stopped before their end, the newest first. “For”: the operation that got their resources."),
      h("div.filters", { role: "search", "aria-label": "Filter the preemptions" },
        textFilter("pool", "Pool", "that lost or got resources", app, { type: "search", isWide: true }),
        textFilter("operation", "Operation", "id of one that lost or got resources", app, { type: "search", isWide: true })),
      groupsSection(groups, inside, open, app),
      records.length ? h("h2", "One by one") : null,
      preemptionsTable("Preemptions, the newest first", records, titles, { empty: isFiltered ? "No preemption matches." : "No job has been preempted since the scheduler started." }),
      records.length >= limit && limit < MOST ? h("div",
        h("button", { type: "button", onclick: () => ask(app, { limit: String(Math.min(limit + 300, MOST)) }) }, "Show older")) : null,
    ];
  },
};

function limitOf(chosen) {
  const limit = Math.trunc(Number(chosen.get("limit")));
  return limit >= 1 && limit <= MOST ? limit : STEP;
}

const kindWord = (kind) => KINDS[kind]?.[0] ?? kind.replaceAll("_", " ");

// ---- by kind, and for whom

function groupsSection({ groups, kept, since }, inside, open, app) {
  if (!groups.length) return null;
  const lost = groups.reduce((all, group) => all + group.lost_core_seconds, 0);
  return h("section.part", { key: "groups", "aria-labelledby": "groups-title" }, h("h2", { id: "groups-title" }, "By cause"),
    folds("Preemptions by cause", groups.map((group) => ({
      key: group.group, count: group.count, words: wordsOf(group),
      amounts: [`${amount("cpu", group.freed_cores)} freed`, `${hours(group.lost_core_seconds)} core-hours lost`, `last ${time(group.last_at)}`],
      body: () => (open === group.group && inside ? [
        h("p.flat", h("span.muted", "The newest one: "), withoutIds(group.why, inside.titles)),
        preemptionsTable(`Preemptions: ${wordsOf(group)}`, inside.preemptions, inside.titles, { without: ["Kind", "Why"] }),
        group.count > inside.preemptions.length ? h("p.muted.flat", `The newest ${inside.preemptions.length} of ${number(group.count, 6)}.`) : null,
      ] : null),
    })), app),
    h("p.muted.flat", `${count(kept, "preemption")} since ${time(since)}: ${hours(lost)} core-hours lost.`));
}

function wordsOf({ kind, priority, preemptor_pool: pool, pools, operations }) {
  const shown = pools.slice(0, MOST_POOLS).join(", ") + (pools.length > MOST_POOLS ? ` and ${pools.length - MOST_POOLS} more` : "");
  const who = pool ? ` for pool ${pool}${priority === "aggressive" ? ", which starves aggressively" : ""}` : "";
  return `${kindWord(kind)}${who}: ${count(operations, "operation")} in ${shown} lost jobs`;
}

const hours = (coreSeconds) => coreHours((coreSeconds ?? 0) / 3600);

// ---- rows

// Records of preemptions as rows; `without`: titles of columns that are left out.
export const preemptionsTable = (caption, rows, titles, { empty, without = [] }) => table({
  caption, rows, columns: columns(titles).filter(({ title }) => !without.includes(title)), rowKey: (record) => `${record.at}-${record.job_id}-${record.kind}`, stacked: true, empty,
});

const poolLink = (tree, pool) => h("a.long", { href: to("pools", tree, pool), title: pool }, pool);

const columns = (titles) => [
  { title: "When", cell: (r) => time(r.at) },
  { title: "Kind", cell: (r) => h("span", { title: KINDS[r.kind]?.[1] },
    badge(kindWord(r.kind), r.kind === "preempted" || r.kind === "overcommit" ? "warn" : "")) },
  { title: "Operation", cell: (r) => operationLink(r.operation_id, titles[r.operation_id]) },
  { title: "Pool", cell: (r) => poolLink(r.tree, r.pool) },
  { title: "Job", cell: (r) => h("a", { title: r.job_id, href: to("operations", r.operation_id, "jobs", r.job_id) }, "job") },
  { title: "Node", cell: (r) => h("a.long", { href: to("nodes", r.node_id), title: r.node_id }, r.node_id) },
  { title: "For", cell: (r) => (r.preemptor_operation_id
    ? h("span", operationLink(r.preemptor_operation_id, titles[r.preemptor_operation_id]), r.preemptor_pool ? [" in ", poolLink(r.tree, r.preemptor_pool)] : null) : "–") },
  { title: "Why", cell: (r) => h("span.sentence", withoutIds(r.why, titles), h("span.muted", ` (freed ${amounts(r.freed)})`)) },
  { title: "Lost", align: "right", cell: (r) => h("span", { title: "Core-hours of work to be repeated" }, hours(r.lost_core_seconds)) },
];
