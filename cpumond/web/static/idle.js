// Why CPU stands idle while work waits: a sentence, the parts of the capacity, and each cause with its change.

import { openChange } from "./actions.js";
import { h } from "./dom.js";
import { capital, cores, number, withoutIds } from "./format.js";
import { to } from "./route.js";
import { table } from "./table.js";

const PARTS = [
  ["used", "used"], ["reused", "reclaimed from others and used"], ["unused", "allocated and not used"], ["silent", "on nodes that are offline"],
  ["starting", "about to be allocated"], ["without_work", "idle for lack of work"], ["held_back", "idle while work waits"],
  ["backfilled", "of these reserved for a gang and backfilled"],
];

// `report`: an answer of /trees/{tree}/why; null where it could not be had.
export function idleSection(report, app) {
  if (!report) return null;
  const parts = PARTS.filter(([key]) => report.parts[key] > 0).map(([key, text]) => `${cores(report.parts[key])} ${text}`);
  return h("section.card", { key: "idle", "aria-labelledby": "idle-title" }, h("h2", { id: "idle-title" }, "Why CPU is idle"),
    h("p.flat", withoutIds(capital(report.sentence)), "."),
    h("p.muted.flat", `Of ${cores(report.parts.capacity)} cores of the tree: ${parts.join(", ") || "none are there"}.`),
    report.causes.length ? causesTable(report, app) : null);
}

const causesTable = (report, app) => table({
  caption: `Obstacles to the use of idle CPU in ${report.pool || report.tree}`, rows: report.causes, rowKey: (cause, index) => `${cause.kind}/${cause.pool}/${index}`, empty: "Nothing.",
  columns: [
    { title: "Cores", help: "cores that would be used with this change alone", align: "right", cell: (cause) => cores(cause.cores) },
    { title: "Obstacle", cell: (cause) => h("code", cause.kind) },
    { title: "Pool", cell: (cause) => (cause.pool ? h("a.long", { href: to("pools", report.tree, cause.pool) }, cause.pool) : "–") },
    { title: "Operations", align: "right", cell: (cause) => number(cause.operation_count, 9) },
    { title: "Why", cell: (cause) => h("span.words", withoutIds(cause.why)) },
    { title: "Change", cell: (cause) => [h("span.words", withoutIds(cause.change.text)), " ", changeButton(report.tree, cause, app)] },
  ],
});

export function changeButton(tree, cause, app) {
  const { commands, shell, text } = cause.change;
  if (commands.length !== 1) return shell.map((line) => h("code.line", { key: line }, line));
  return h("button", { type: "button", title: shell.join("\n"), onclick: () => openChange(commands[0], `${cause.why}: ${text}.`, app) }, "What it changes");
}
