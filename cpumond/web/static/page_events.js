// All events, and the audit log: who asked for what, from where, and why it was allowed or refused.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { eventsTable, FIRST_COLUMNS, kindChoices, PAGE, what, who } from "./events.js";
import { selectFilter, textFilter } from "./filters.js";
import { readRights } from "./rights.js";

const NAMES = ["kind", "tree", "pool", "node", "operation", "user", "before"];
const SPANS = { "3600": "last hour", "86400": "last day", "604800": "last week" };

const AUDIT_COLUMNS = (titles) => [
  ...FIRST_COLUMNS,
  { title: "User and origin", cell: (event) => h("span.origin", h("strong", who(event)), h("div.muted", event.origin)) },
  { title: "Command, and why it was allowed or refused", cell: (event) => [what(event, titles), event.allowed_by ? h("div.muted.because", event.allowed_by) : null] },
];

const page = (path, title, text, kinds, columns) => ({
  title: () => title,
  async load(_, { signal, query: chosen }) {
    const asked = Object.fromEntries(NAMES.map((name) => [name, chosen.get(name)]));
    const since = Object.hasOwn(SPANS, chosen.get("since")) ? chosen.get("since") : null;
    const [found, rights] = await Promise.all([get(`${path}${query({ ...asked, since_s: since, limit: PAGE })}`, { signal }), readRights()]);
    return { found, rights };
  },
  view: ({ found, rights }, _, app) => [
    h("h1", title), h("p.muted.plain-text", text),
    h("div.filters", { role: "search", "aria-label": `Filter the ${title.toLowerCase()}` },
      selectFilter("kind", "Kind", kinds, app), selectFilter("since", "Since", Object.entries(SPANS), app),
      textFilter("tree", "Tree", "name of a tree", app), textFilter("pool", "Pool", "and the pools below it", app),
      textFilter("node", "Node", "id of a node", app), textFilter("operation", "Operation", "id of an operation", app),
      textFilter("user", "User", "name of a user", app)),
    eventsTable(found, rights, app, columns),
  ],
});

export const events = page("/events", "Events", "Changes, the newest first.", kindChoices());
export const audit = page("/audit", "Audit log", "All commands and refusals. Administrators see all; others see their own, and those on pools whose access list they may change.",
  kindChoices(["command", "refused"]), AUDIT_COLUMNS);
