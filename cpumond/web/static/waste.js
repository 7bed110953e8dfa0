// What the orders of the last week left unused, of a user or a pool: a sentence for each tree, and its classes of jobs.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { cores, hours, number } from "./format.js";
import { historyIsOff, remember } from "./history.js";
import { table } from "./table.js";

const PERIOD_MS = 300000; // a week changes slowly, and all jobs that are known are added up

export async function readWaste(asked) {
  if (await historyIsOff()) return [];
  const where = `/waste${query(asked)}`;
  const { value } = await remember(where, PERIOD_MS, () => get(where));
  return value ? [...value.users, ...value.pools] : [];
}

export const wasteSection = (summaries) => (summaries.length === 0 ? null
  : h("section.part", { key: "waste", "aria-labelledby": "waste-title" }, h("h2", { id: "waste-title" }, "Requested and not used in the last week"),
    summaries.map((each) => h("div", { key: each.tree },
      h("p.plain-text", each.sentence, summaries.length > 1 ? ` (tree ${each.tree})` : ""),
      each.classes.length ? table({ caption: `Classes of jobs of the last week, in core-hours, tree ${each.tree}`, columns: COLUMNS, rows: each.classes, rowKey: (kind) => kind.sentence, stacked: true }) : null))));

const COLUMNS = [
  { title: "Jobs of", help: "Titles that differ only in numbers are merged", cell: (kind) => [kind.title || "no title", kind.task ? `, task ${kind.task}` : "", kind.job_class === "reclaimed" ? ", on reclaimed CPU" : ""] },
  { title: "Jobs", align: "right", cell: (kind) => number(kind.jobs, 6) },
  { title: "Requested", align: "right", help: "Core-hours", cell: (kind) => hours(kind.ordered) },
  { title: "Used", align: "right", help: "Core-hours", cell: (kind) => hours(kind.used) },
  { title: "Cores requested", align: "right", cell: (kind) => cores(kind.ordered_cores) },
  { title: "Cores used", align: "right", help: "On average", cell: (kind) => cores(kind.used_cores) },
  { title: "Suggested", align: "right", help: "By the mean usage of the jobs plus a quarter", cell: (kind) => (kind.better_cores === null ? "–" : cores(kind.better_cores)) },
];
