// The operations of who asks: when they start and end, and what holds them.

import { operationsActions } from "./actions.js";
import { get, query } from "./api.js";
import { h } from "./dom.js";
import { count, duration, evenly, number, time } from "./format.js";
import { poolLinks, predicted, stateBadge, titleLink } from "./page_operations.js";
import { readRights } from "./rights.js";
import { to } from "./route.js";
import { figure, table } from "./table.js";
import { readWaste, wasteSection } from "./waste.js";

const LIVE = 200;
const ENDED = 10;

export const mine = {
  title: () => "My work",
  async load(_, { signal }) {
    const me = await get("/me", { signal });
    const asked = (more) => get(`/operations${query({ user: me.user, ...more })}`, { signal });
    const [live, groups, rights, waste, ...ended] = await Promise.all([
      asked({ state: "live", limit: LIVE }), get(`/operation_groups${query({ user: me.user })}`, { signal }), readRights(), readWaste({ user: me.user }),
      ...["completed", "failed", "aborted"].map((state) => asked({ state, limit: ENDED })),
    ]);
    const last = ended.flatMap(({ operations }) => operations).sort((a, b) => b.finish_time - a.finish_time).slice(0, ENDED);
    return { me, live, states: groups.states, groups: groups.groups.filter(({ tree }) => tree), rights, waste, last };
  },
  view({ me, live, states, groups, rights, waste, last }, _, app) {
    const [allocated, wanted] = evenly(["limit_cores", "wanted_cores"].map((name) => groups.reduce((all, group) => all + group[name], 0)));
    return [
      h("div.heading", h("h1", "My work"), h("span.muted", `of ${me.user}`), h("div.actions", operationsActions(app, rights))),
      live.total + last.length === 0
        ? h("p.note", `No operation of ${me.user} is known. Start one here, or with `, h("code", "cpumond run COMMAND"), ".")
        : h("div.cards.figures", figure(number(states.running ?? 0, 6), "running"), figure(number((states.pending ?? 0) + (states.waiting ?? 0), 6), "waiting to run"),
          states["cannot start"] ? figure(number(states["cannot start"], 6), "cannot start") : null,
          figure(allocated, "cores allocated"), figure(wanted, "more cores wanted")),
      h("section.part", { "aria-labelledby": "live-title" }, h("h2", { id: "live-title" }, "Running and waiting"),
        table({ caption: "Your operations that run or wait", columns: COLUMNS, rows: live.operations, rowKey: (o) => o.id, stacked: true, empty: "None." }),
        live.total > live.operations.length ? h("p.muted.flat", `The newest ${count(live.operations.length, "operation")} of ${number(live.total, 6)}; `,
          h("a", { href: to("operations", { user: me.user }) }, "all of them"), ".") : null),
      last.length ? h("section.part", { "aria-labelledby": "last-title" }, h("h2", { id: "last-title" }, "Ended recently"),
        table({ caption: "Your operations that ended recently", columns: ENDED_COLUMNS, rows: last, rowKey: (o) => o.id, stacked: true })) : null,
      wasteSection(waste),
    ];
  },
};

const whys = (o) => Object.entries(o.trees).map(([tree, part], index, all) => [index ? "; " : "", all.length > 1 ? `${tree}: ` : "", part.cause === "working" ? "nothing" : part.why,
  part.queue_place ? `, number ${number(part.queue_place, 6)} in the queue` : ""]);

const COLUMNS = [
  { title: "Operation", cell: titleLink },
  { title: "State", cell: stateBadge },
  { title: "Pool", cell: poolLinks },
  { title: "Waits for", cell: (o) => h("a.sentence", { href: to("operations", o.id, { tab: "why" }) }, whys(o)) },
  { title: "Jobs", align: "right", help: "Active, and to start", cell: (o) => `${number(o.jobs.active, 6)} + ${number(o.jobs.pending, 6)}` },
  { title: "Starts", align: "right", help: "Median of many simulations", cell: (o) => (["running", "cannot start"].includes(o.shown_state) ? h("span.muted", o.shown_state === "running" ? "runs" : "never, as things are") : predicted(o.forecast, "start") ?? "–") },
  { title: "Ends", align: "right", help: "Median of many simulations", cell: (o) => predicted(o.forecast, "end") ?? "–" },
];

const ENDED_COLUMNS = [
  ...COLUMNS.slice(0, 3),
  { title: "Why", cell: (o) => h("span.sentence", o.error || "–") },
  { title: "Ended", align: "right", cell: (o) => time(o.finish_time) },
  { title: "Took", align: "right", cell: (o) => duration(o.finish_time - o.start_time) },
];
