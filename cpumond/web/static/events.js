// What happened, the newest first: a part of other pages, and what the pages Events and Audit are made of.

import { openUndo } from "./actions.js";
import { get, query } from "./api.js";
import { h, skeleton } from "./dom.js";
import { ask, selectFilter } from "./filters.js";
import { time, withoutIds, zone } from "./format.js";
import { remember } from "./history.js";
import { mayOn, ROOT } from "./rights.js";
import { currentQuery, to } from "./route.js";
import { badge, table } from "./table.js";

export const PAGE = 50;
const EVENTS_MS = 1500;
const PATIENCE_MS = 600;
const SHORT_VALUE = 120;

// kind -> [words, tone]
const KINDS = {
  command: ["command"], refused: ["refused", "bad"],
  node_registered: ["node registered", "good"], node_silent: ["node silent", "warn"], node_lost: ["node lost", "bad"], node_returned: ["node returned", "good"],
  preemption: ["preemption", "warn"], operation_failed: ["operation failed", "bad"], operation_stuck: ["operation stuck", "warn"], budget: ["budget", "warn"], limit_contested: ["limit contested", "warn"],
  node_failing: ["node fails", "bad"], node_works: ["node works", "good"],
  take_over: ["take-over", "warn"], started: ["started"], reload: ["reload"],
};
// Refusals are in the audit log alone.
export const kindChoices = (kinds = Object.keys(KINDS).filter((kind) => kind !== "refused")) => kinds.map((kind) => [kind, KINDS[kind][0]]);

// An answer of /events for a part of a page: `about` is {tree, pool, node, operation}. {value, error, about}; asked for as
// the address says.
export async function readEvents(about) {
  const chosen = currentQuery();
  const where = `/events${query({ ...about, kind: chosen.get("kind"), before: chosen.get("before"), limit: PAGE })}`;
  return { ...await remember(where, EVENTS_MS, () => get(where), PATIENCE_MS), about };
}

// `rights`: what readRights() gave.
export const eventsSection = ({ value, error, about }, rights, app) => h("section.part.events", { key: "events", "aria-labelledby": "events-title" },
  h("div.heading", h("h2", { id: "events-title" }, "Events"), h("a", { href: to("events", Object.fromEntries(Object.entries(about).filter(([, name]) => name))) }, "more filters")),
  h("div.filters", selectFilter("kind", "Kind", kindChoices(), app)),
  error && error.status !== 0 ? h("p.error", { role: "alert" }, error.message) : null,
  value ? eventsTable(value, rights, app) : error ? null : skeleton());

// An answer of /events or /audit as rows with buttons for the parts before and after; `columns` (titles => columns) of the audit log, in place of those of events.
export function eventsTable({ events, next, titles = {} }, rights, app, columns = COLUMNS) {
  const before = currentQuery().get("before");
  const known = [...columns(titles), { title: "About", cell: (event) => about(event, titles) }, undoColumn(rights, app)];
  return [
    table({
      caption: "Events, the newest first", rows: events, rowKey: (event) => event.number, columns: known, stacked: true,
      empty: before ? "There are no older events." : "There are no matching events.",
    }),
    before || next !== null ? h("nav.pager", { key: "pager", "aria-label": "Parts of the list" },
      step("← Newest", !before, () => ask(app, {})),
      step("Older →", next === null, () => ask(app, { before: String(next) }))) : null,
  ];
}

// At the end of a list the focus stays on the button that led there.
export const step = (text, isOff, act) => h("button", { type: "button", "aria-disabled": isOff ? "true" : null, onclick: isOff ? () => {} : act }, text);

// ---- rows

function kindBadge({ kind, count }) {
  const [words, tone] = KINDS[kind] ?? [kind.replaceAll("_", " ")];
  return [badge(words, tone), count > 1 ? ` × ${count}` : null];
}

export const when = (event) => h("span", { title: `${time(event.at)} ${zone(event.at)}` }, time(event.at));

export const who = ({ user, acting }) => (acting ? `${acting} as ${user}` : user || "–");

function about(event, titles) {
  const short = (id) => id.split("-")[0];
  const links = [
    event.tree ? h("a.long", { key: "pool", href: event.pool ? to("pools", event.tree, event.pool) : to("pools", event.tree, ROOT) },
      event.pool ? `pool ${event.pool}` : `tree ${event.tree}`) : null,
    event.operation ? h("a.long", { key: "operation", href: to("operations", event.operation), title: [titles[event.operation], event.operation].filter(Boolean).join(", ") },
      `operation ${titles[event.operation] || short(event.operation)}`) : null,
    event.operation && event.job ? h("a", { key: "job", href: to("operations", event.operation, "jobs", event.job), title: event.job }, `job ${short(event.job)}`) : null,
    event.node ? h("a.long", { key: "node", href: to("nodes", event.node) }, `node ${event.node}`) : null,
  ].filter(Boolean);
  return links.length ? h("span.about", links.flatMap((link, index) => (index ? [", ", link] : [link]))) : "–";
}

export const what = (event, titles = {}) => h("span.sentence", withoutIds(event.text, titles), event.undoes ? h("span.muted", ` (undoes ${event.undoes})`) : null,
  event.changes.length ? h("details", h("summary.muted", "Before and after"),
    h("ul.changes", event.changes.map((change, index) => h("li", { key: index }, changeText(change))))) : null,
  event.plan ? h("div.muted", `Preview: ${event.plan}`) : null);

export function changeText({ pool, attribute, old, new: now }) {
  const name = pool || "the tree";
  if (attribute) return [h("code", attribute), ` of ${name}: ${show(old)} → ${show(now)}`];
  return old === undefined || old === null ? `${name} is new: ${show(now)}` : `${name} is removed: it had ${show(old)}`;
}

function show(value) {
  if (value === undefined || value === null) return "not set";
  const text = JSON.stringify(value);
  return text.length > SHORT_VALUE ? `${text.slice(0, SHORT_VALUE)}…` : text;
}

export const FIRST_COLUMNS = [
  { title: "Number", align: "right", cell: (event) => String(event.number) },
  { title: "When", cell: when },
  { title: "Kind", cell: kindBadge },
];
const COLUMNS = (titles) => [
  ...FIRST_COLUMNS,
  { title: "Who", cell: (event) => h("span.long", { title: who(event) }, who(event)) },
  { title: "What", cell: (event) => what(event, titles) },
];

// Changes of pools and trees can be taken back by those who may make them.
function undoColumn(rights, app) {
  const isOffered = (event) => event.can_undo
    && mayOn(rights, event.tree, event.pool, "write", "modify_children", "administer");
  return { title: h("span.hidden-text", "Undo"), cell: (event) => (isOffered(event)
    ? h("button.small", { type: "button", "aria-label": `Undo change ${event.number}`, onclick: () => openUndo(event, app) }, "Undo") : "") };
}
