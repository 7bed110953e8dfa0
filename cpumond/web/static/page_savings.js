// What reclaimed CPU was worth and what that cost, of each pool and week, and jobs whose limits move against the control group.

import { get } from "./api.js";
import { chosenColumns, columnMenu, sameColumns } from "./columns.js";
import { h } from "./dom.js";
import { ask } from "./filters.js";
import { count, duration, hours as coreHours, number, percent, time } from "./format.js";
import { currentQuery, to } from "./route.js";
import { bigTable, figure, table } from "./table.js";

const DAY_S = 86400;
const WEEK_S = 7 * DAY_S;
const THURSDAY_S = 3 * DAY_S; // the first of January 1970, since its Monday
const LENGTHS = [[7 * DAY_S, "1 week"], [28 * DAY_S, "4 weeks"], [91 * DAY_S, "13 weeks"], [364 * DAY_S, "1 year"]];
const USUAL_S = 28 * DAY_S;
const ALL_BUT_A_LITTLE = 0.99;
const PERIOD_MS = 30000; // sums over weeks

export const savings = {
  title: () => "Savings",
  period: PERIOD_MS,
  load: (_, { signal }) => get(`/savings?since_s=${chosenLength()}`, { signal }),
  view(found, _, app) {
    const shown = found.trees.filter((tree) => tree.total.length);
    return [
      h("div.heading", h("h1", "Savings"), h("div.actions", lengthField(app))),
      h("p.muted.plain-text", "Core-hours used by jobs beyond the requests that fit on their nodes: without reclaimed CPU these jobs would have waited."),
      found.covered_s < ALL_BUT_A_LITTLE * (found.until - found.since)
        ? h("p.note", { key: "covered" }, `Only ${duration(found.covered_s)} of the time from ${time(found.since)} to ${time(found.until)} are recorded.`) : null,
      found.core_hour_price ? null
        : h("p.muted.plain-text", { key: "price" }, "In core-hours only: the scheduler's configuration has no core_hour_price."),
      shown.length ? shown.map((tree) => showTree(tree, found, shown.length > 1, app))
        : h("p.note", { key: "none" }, "Nothing is recorded for this time yet."),
    ];
  },
};

function chosenLength() {
  const asked = Number(currentQuery().get("since_s"));
  return LENGTHS.some(([length]) => length === asked) ? asked : USUAL_S;
}

const lengthField = (app) => h("div.field", h("label", { for: "savings-length" }, "The last"),
  h("select", { id: "savings-length", value: String(chosenLength()), onchange: (event) => ask(app, { since_s: event.target.value }) },
    LENGTHS.map(([length, text]) => h("option", { value: String(length), key: length }, text))));

function showTree(tree, found, isNamed, app) {
  const [root] = tree.total;
  const of = isNamed ? ` of tree ${tree.tree}` : "";
  return h("div.page", { key: tree.tree },
    isNamed ? h("h2", `Tree ${tree.tree}`) : null,
    h("section.card", { "aria-label": `Balance${of}` }, h("div.cards", balance(root, found))),
    h("section", { "aria-label": `Control group${of}` }, h("h2", "Control group"), showComparison(tree.comparison, of)),
    h("section", { "aria-label": `By pool${of}` }, h("h2", "By pool"),
      poolTable(`Savings by pool${of}`, isNamed ? `${tree.tree}-` : "", tree.total, tree.tree, found, app)),
    h("section", { "aria-label": `By week${of}` }, h("h2", `By week, from ${clockOfWeeks(found)}`), tree.weeks.map((week) => showWeek(week, tree.tree, found, of, app))));
}

const hours = (value) => coreHours(value, 4);
const money = (value, found) => `${number(value, 4)}${found.currency ? ` ${found.currency}` : ""}`;

function balance(root, found) {
  const figures = [
    ["core-hours beyond requests", hours(root.extra_used), "Used by jobs beyond the requests that fit on their nodes"],
    ["jobs on reclaimed CPU", number(root.extra_jobs, 6), "Jobs that were, at least in part, beyond the requests that fit"],
    ["core-hours throttled", hours(root.held_back), "Time for which jobs were throttled while their limits were lowered"],
    ["core-hours lost", hours(root.lost), "Work of preempted jobs that has to be repeated"],
    ["core-hours gained", hours(root.gain), "Used beyond requests, minus throttled and lost"],
  ];
  if (root.money !== null) figures.push(["gained", money(root.money, found), `At ${number(found.core_hour_price, 6)} ${found.currency} a core-hour`]);
  return figures.map(([name, value, title]) => figure(value, name, { tag: "div", title }));
}

// Weeks are of UTC: their Monday begins at this time here, or on another day.
function clockOfWeeks({ until }) {
  const monday = 1000 * (Math.floor((until + THURSDAY_S) / WEEK_S) * WEEK_S - THURSDAY_S);
  const parts = { weekday: "long", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZoneName: "short" };
  return new Intl.DateTimeFormat("en-GB", parts).format(new Date(monday));
}

// The pools of a week are in the page while it is unfolded.
function showWeek(week, tree, found, of, app) {
  const [root] = week.pools;
  const monday = time(week.since);
  const open = app.local.openWeeks ??= new Set();
  // The first one begins later with each answer.
  const name = `${tree}-${Math.floor((week.since + THURSDAY_S) / WEEK_S)}`;
  const unfold = ({ currentTarget }) => {
    if (currentTarget.open === open.has(name)) return;
    if (!open.delete(name)) open.add(name);
    app.redraw();
  };
  return h("details", { key: name, ontoggle: unfold },
    h("summary", `${monday}: ${hours(root.extra_used)} core-hours beyond requests, ${hours(root.gain)} gained`
      + `${root.money === null ? "" : `, ${money(root.money, found)}`} (${duration(week.covered_s)} recorded)`),
    open.has(name) ? poolTable(`Savings of the week of ${monday}${of}`, `${name}-`, week.pools, tree, found, app) : null);
}

// Pools below their parents, as far as these have something to show.
function poolTable(caption, prefix, rows, tree, found, app) {
  const names = new Set(rows.map((row) => row.name));
  const all = sameColumns(`savings ${tree} ${found.core_hour_price ? found.currency : null}`, () => makeColumns(tree, found));
  return bigTable(`savings-${prefix}`, {
    caption, prefix, rows, columns: chosenColumns("savings", all), tools: columnMenu("savings", all, app), noun: "pool", height: "60vh",
    rowKey: (row) => row.name, searchable: (row) => row.name, parentKey: ({ parent }) => (names.has(parent) ? parent : null),
  });
}

function makeColumns(tree, found) {
  const column = (key, title, help, shown = "wide", show = hours) => ({ key, shown, width: 140, narrow: 122, title, help, align: "right", value: (row) => row[key], cell: (row) => show(row[key]) });
  return [
    { key: "name", width: 240, narrow: 134, title: "Pool", value: (row) => row.name, cell: (row) => h("a", { href: to("pools", tree, row.name), title: row.name }, row.name) },
    column("extra_used", "Beyond requests", "Core-hours used beyond the requests that fit", "always"),
    column("gain", "Gained", "Beyond requests, minus throttled and lost", "always"),
    ...(found.core_hour_price ? [column("money", "In money", undefined, "wide", (value) => money(value, found))] : []),
    column("held_back", "Throttled", "Core-hours for which jobs were throttled while their limits were lowered"),
    column("lost", "Lost", "Core-hours of preempted jobs that have to be repeated"),
    column("reclaimed", "Reclaimed", "Core-hours by which limits were lowered"),
    column("extra_jobs", "Jobs", "Jobs that started on reclaimed CPU", "wide", (value) => number(value, 6)),
  ];
}

function showComparison(comparison, of) {
  if (!comparison) return h("p.note", "No host keeps a control group of jobs in shadow mode (control_group_ratio of the agents).");
  const rows = [["Throttled, of requested", comparison.held_back], ["Used, of requested", comparison.used]];
  return [
    h("p.plain-text", comparison.sentence),
    table({
      caption: `Control group against others${of}`, rows, rowKey: ([name]) => name, stacked: true, empty: "None.",
      columns: [
        { title: "What", cell: ([name]) => name },
        { title: "Control group", align: "right", cell: ([, each]) => percent(each.control) },
        { title: "Others", align: "right", cell: ([, each]) => percent(each.others) },
        { title: "Difference, 95 %", align: "right", cell: ([, each]) => (each.low === null ? "too few jobs" : `${points(each.low)} to ${points(each.high)} points`) },
      ],
    }),
    h("p.muted.plain-text", `${hours(comparison.control_ordered)} core-hours requested in the control group, ${hours(comparison.others_ordered)} by others; `
      + `${count(comparison.days, "day")} on which jobs of both groups ran.`),
  ];
}

const points = (ratio) => `${ratio < 0 ? "−" : "+"}${number(Math.abs(100 * ratio), 3)}`;
