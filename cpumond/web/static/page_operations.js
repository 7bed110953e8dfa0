// All operations, a page at a time: the scheduler searches, filters and sorts.

import { operationsActions } from "./actions.js";
import { get, query, serverNow } from "./api.js";
import { h } from "./dom.js";
import { step } from "./events.js";
import { ask, selectFilter, textFilter } from "./filters.js";
import { amount, count, duration, number, share, time } from "./format.js";
import { readRights } from "./rights.js";
import { currentQuery, to } from "./route.js";
import { badge, bar, chosenFold, folds, operationLink, sortButton, table } from "./table.js";

export const STATES = ["pending", "running", "completed", "failed", "aborted"];
const TONES = { running: "good", pending: "warn", waiting: "warn", "cannot start": "bad", failed: "bad", aborted: "warn" };
const PAGE = 50;
const FILTERS = ["search", "tree", "pool", "user"]; // of the groups, too
const NAMES = [...FILTERS, "state", "cause", "sort", "descending"];
const IN_A_GROUP = 20;

export const operations = {
  title: () => "Operations",
  async load(_, { signal, query: chosen }) {
    const asked = Object.fromEntries(NAMES.map((name) => [name, chosen.get(name)]));
    const few = Object.fromEntries(FILTERS.map((name) => [name, chosen.get(name)]));
    const offset = offsetOf(chosen);
    const open = chosenFold();
    const [list, groups, inside, trees, rights] = await Promise.all([
      get(`/operations${query({ ...asked, limit: PAGE, offset: offset || null })}`, { signal }),
      get(`/operation_groups${query(few)}`, { signal }),
      open ? get(`/operations${query({ ...few, ...groupOf(open), limit: IN_A_GROUP })}`, { signal }) : null,
      get("/trees", { signal }), readRights()]);
    return { list, groups: groups.groups, inside, open, trees: trees.trees.map((tree) => tree.name), rights, offset, asked: `${chosen}` };
  },
  view(data, _, app) {
    const { list, offset } = data;
    app.announce(data.asked, describeCount(list, offset));
    return [
      h("div.heading", h("h1", "Operations"), h("div.actions", operationsActions(app, data.rights))),
      tools(data, app),
      groupsSection(data, app),
      h("p.muted.plain-text", describeCount(list, offset)),
      table({
        caption: "Operations", rows: list.operations, rowKey: (operation) => operation.id, columns: columns(app),
        empty: isFiltered() ? "No operation matches." : "No operation has been started yet.",
      }),
      pager(list.total, offset, list.operations.length, PAGE, app),
    ];
  },
};

const offsetOf = (chosen) => Math.max(Math.trunc(Number(chosen.get("offset"))) || 0, 0);
const isFiltered = () => [...FILTERS, "state", "cause"].some((name) => currentQuery().get(name));

function describeCount(list, offset) {
  const all = count(list.total, isFiltered() ? "matching operation" : "operation");
  if (!list.operations.length || list.operations.length === list.total) return all;
  return `${all}, ${offset + 1} to ${offset + list.operations.length} shown`;
}

// ---- by what they wait for

const keyOf = (group) => `${group.tree}/${group.cause}`;
const groupOf = (key) => ({ tree: key.split("/")[0] || null, cause: key.slice(key.indexOf("/") + 1) });

function groupsSection({ groups, inside, open, trees }, app) {
  if (!groups.length) return null;
  return h("section.part", { key: "groups", "aria-labelledby": "groups-title" }, h("h2", { id: "groups-title" }, "What operations wait for"),
    folds("Operations by what they wait for", groups.map((group) => ({
      key: keyOf(group), count: group.operations,
      words: `${group.why}${trees.length > 1 && group.tree ? `, in ${group.tree}` : ""}`,
      amounts: [group.jobs ? `${count(group.jobs, "job")} to start, ${amount("cpu", group.wanted_cores)}` : null, group.limit_cores ? `${amount("cpu", group.limit_cores)} allocated` : null],
      body: () => (open === keyOf(group) && inside ? groupBody(group, inside, app) : null),
    })), app));
}

const groupBody = (group, inside, app) => [
  table({
    caption: `Operations: ${group.why}`, rows: inside.operations, rowKey: (o) => o.id, stacked: true, empty: "No operations any more.", columns: [
      { title: "Operation", cell: titleLink }, { title: "Pool", cell: poolLinks }, { title: "User", cell: (o) => o.user },
      { title: "State", cell: (o) => [stateBadge(o), startsIn(o.forecast)] },
      { title: "Jobs", align: "right", help: "Active, and to start", cell: (o) => `${number(o.jobs.active, 6)} + ${number(o.jobs.pending, 6)}` },
      { title: "Started", align: "right", cell: (o) => time(o.start_time) },
    ],
  }),
  h("p.flat", h("button", { type: "button", onclick: () => ask(app, { tree: group.tree || null, cause: group.cause, state: null }) },
    inside.total > inside.operations.length ? `Show all ${number(inside.total, 6)} in the list below` : "Show only these in the list below")),
];

export const titleLink = (o) => operationLink(o.id, nameOf(o));

function tools({ trees, groups }, app) {
  const causes = [...new Map(groups.filter(({ tree }) => tree).map(({ cause, why }) => [cause, why]))];
  const same = (values) => values.map((value) => [value, value]);
  return h("div.filters", { role: "search", "aria-label": "Filter the operations" },
    textFilter("search", "Search", "id, title, alias, user, pool", app, { type: "search", isWide: true }),
    selectFilter("state", "State", same(STATES), app), selectFilter("cause", "Waits for", withChosen(causes), app), selectFilter("tree", "Tree", same(trees), app),
    textFilter("pool", "Pool", "name of a pool", app), textFilter("user", "User", "name of a user", app));
}

// The chosen cause stays a choice when no operation has it any more.
function withChosen(causes) {
  const chosen = currentQuery().get("cause");
  return !chosen || causes.some(([cause]) => cause === chosen) ? causes : [...causes, [chosen, chosen]];
}

// Whether, by its last forecast, it should have started in nine of ten runs ahead.
export const isLate = (forecast) => forecast.start_p90 !== null && forecast.start_p90 < serverNow();

// "in 5 min" of a forecast's start or end, its range at the mouse; null where it is not predicted.
export function predicted(forecast, name) {
  const [first, middle, last] = ["p10", "p50", "p90"].map((part) => forecast?.[`${name}_${part}`] ?? null);
  if (middle === null) return null;
  const left = middle - serverNow();
  const text = name === "start" && isLate(forecast) ? "late" : left > 1 ? `in ${duration(left)}` : "soon";
  return h("span", { title: `Eight of ten simulations: ${time(first)} to ${last === null ? "later than is simulated" : time(last)}` }, text);
}

function startsIn(forecast) {
  const text = predicted(forecast, "start");
  return text && h("span.muted", isLate(forecast) ? " " : " starts ", text);
}

// Buttons for the previous and the next part of a long list; the URL has the place as `offset`.
export function pager(total, offset, shown, size, app) {
  if (total <= size && !offset) return null;
  const go = (place) => app.ask({ offset: place > 0 ? place : null });
  return h("nav.pager", { "aria-label": "Parts of the list" },
    step("← Previous", offset <= 0, () => go(Math.min(offset - size, Math.max(total - 1, 0)))),
    h("span", shown ? `${offset + 1}–${offset + shown} of ${total.toLocaleString("en-GB")}` : `none of ${total.toLocaleString("en-GB")}`),
    step("Next →", offset + shown >= total, () => go(offset + size)));
}

// ---- rows

function columns(app) {
  const chosen = currentQuery();
  const sort = chosen.get("sort") ?? "start_time";
  const descending = chosen.get("descending") !== "false";
  const sorting = (key, title, first = true) => {
    const order = sort !== key ? null : descending ? "descending" : "ascending";
    const wanted = order ? !descending : first;
    return { title: sortButton(title, order, () => ask(app, { sort: key === "start_time" ? null : key, descending: wanted ? null : "false" })), sorted: order };
  };
  return [
    { ...sorting("title", "Operation", false), cell: titleLink },
    { ...sorting("state", "State", false), cell: (o) => [stateBadge(o), partState(o), startsIn(o.forecast)] },
    { ...sorting("user", "User", false), cell: (o) => h("span.long", { title: o.user }, o.user) },
    { title: "Pool", cell: (o) => poolLinks(o) },
    { ...sorting("jobs", "Active"), align: "right", help: "Jobs that are active now", cell: (o) => number(o.jobs.active, 6) },
    { title: "To start", align: "right", help: "Jobs that have yet to start", cell: (o) => number(o.jobs.pending, 6) },
    { title: "Done", align: "right", help: "Completed jobs, and all jobs", cell: (o) => `${number(o.jobs.completed, 6)} / ${number(o.jobs.total, 6)}` },
    { ...sorting("fair_share", "Fair share"), align: "right", help: "The greatest of its trees, of the dominant resource",
      cell: (o) => shareBar(o, "fair_share", "--c2") },
    { ...sorting("usage", "Allocated"), align: "right", help: "The greatest of its trees, of the dominant resource",
      cell: (o) => shareBar(o, "usage", "--c1") },
    { ...sorting("start_time", "Started"), align: "right", cell: (o) => time(o.start_time) },
  ];
}

const parts = (operation) => Object.values(operation.trees);
export const nameOf = (operation) => [operation.title, operation.alias].filter(Boolean).join(" ");

function shareBar(operation, name, color) {
  const known = parts(operation).map((part) => [part[`${name}_ratio`], part[`${name}_resource`]]);
  if (!known.length) return "–";
  const [ratio, resource] = known.reduce((most, each) => (each[0] > most[0] ? each : most));
  return bar(ratio, share(ratio, resource), { color });
}

export const stateBadge = (operation) => [badge(operation.shown_state, TONES[operation.shown_state] ?? ""), operation.suspended ? [" ", badge("suspended", "warn")] : null];

const partState = (operation) => parts(operation).map((part) => {
  const text = describePart(part);
  return text ? [" ", h("a", { href: to("operations", operation.id, { tab: "why" }), title: "Why?" },
    badge(text.replace(/^cannot start: /, ""), part.queue_place === null || part.cause === "cannot_start" ? "bad" : "warn"))] : null;
});

// Why it can never start, its place in the queue, or that it starves; "" for none of these.
export function describePart(part) {
  if (part.cause === "cannot_start") return part.why;
  if (part.queue_place !== null) return `number ${part.queue_place} in the queue`;
  return part.starvation_status === "non_starving" ? "" : part.starvation_status.replaceAll("_", " ");
}

export function poolLinks(operation) {
  const pools = Object.entries(operation.pools);
  return pools.map(([tree, pool], index) => [index ? ", " : null,
    h("a.long", { key: tree, href: to("pools", tree, pool), title: pool }, pools.length > 1 ? `${tree}: ${pool}` : pool)]);
}
