// One node: its ledger, and the jobs that add up to it.

import { nodeActions } from "./actions.js";
import { get, path, serverNow } from "./api.js";
import { chart } from "./chart.js";
import { h } from "./dom.js";
import { eventsSection, readEvents } from "./events.js";
import { bytes, cores, count, fixed, number, formatCores, formatSpan } from "./format.js";
import { axis, DAY_S, line, rangeButtons, readHistory } from "./history.js";
import { OF_NODES, readMarks } from "./marks.js";
import { nodeState } from "./page_nodes.js";
import { jobsTable } from "./page_operation.js";
import { readRights } from "./rights.js";
import { to } from "./route.js";
import { badge, facts, table } from "./table.js";

const PATIENCE_MS = 500;
const NAMES = { cpu: "CPU, cores", memory: "Memory", gpu: "GPUs", user_slots: "Job slots", network: "Network" };

export const node = {
  title: ({ node: id }) => `Node ${id}`,
  async load({ node: id }, { signal }) {
    const found = await get(path`/nodes/${id}`, { signal });
    const [history, events, rights, marks] = await Promise.all([readHistory({ kind: "node", name: id }, undefined, PATIENCE_MS), readEvents({ node: id }), readRights(),
      readMarks({ node: id }, [...OF_NODES, "preemption", "command"])]);
    return { node: found, history, events, rights, marks };
  },
  view({ node: n, history, events, rights, marks }, _, app) {
    return [
      h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: "#/nodes" }, "Nodes"), h("span", n.id)),
      h("div.heading", h("h1", `Node ${n.id}`), badge(...nodeState(n)), h("div.actions", nodeActions(n, app, rights))),
      h("section.card", { key: "facts", "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "Facts"), facts([
        ["Address", n.address],
        ["Tree", n.matched_trees.length ? `its tags match ${n.matched_trees.join(" and ")}: its jobs continue, no new ones start` : n.tree === null ? "none: no tree's nodes_filter matches its tags, so it gets no work" : h("a", { href: to("pools", n.tree) }, n.tree)],
        ["Tags", n.tags.join(", ") || "none"],
        ["Last heard of", `${formatSpan(n.silent_s)} ago`],
        ["Jobs", count(n.job_count, "job") + (n.stopping_job_count ? `, ${n.stopping_job_count} ending` : "")],
        n.on_reclaimed_cores || n.idle_class ? ["On reclaimed CPU", `${cores(n.on_reclaimed_cores)} cores, ${n.idle_class ? `idle class: ${n.idle_class}` : "without an idle class"}`] : null,
        ["Overcommitted", describeOvercommits(n)],
        ...(n.cordon ? [["Cordon", describeCordon(n.cordon)]] : []),
        n.failing ? ["Failing", n.failing] : null,
      ])),
      ledger(n),
      h("div.heading", { key: "range" }, h("h2", "Over time"), rangeButtons(app, DAY_S)),
      h("section.card", { key: "graph" }, chart(`node-${n.id}`, graph(history, marks))),
      h("section.card", { key: "jobs", "aria-labelledby": "jobs" }, h("h2", { id: "jobs" }, "Jobs"),
        jobsTable(n.jobs, { caption: `Jobs of node ${n.id}`, empty: "It runs no job.", titles: n.titles ?? {} })),
      eventsSection(events, rights, app),
    ];
  },
};

const describeCordon = ({ user, at, why, drain }) => `${drain ? "drained" : "cordoned"} by ${user} ${formatSpan(serverNow() - at)} ago: it gets no new jobs${drain ? ", and the jobs on it are stopped" : ""}${why ? ` (${why})` : ""}`;

const describeOvercommits = (n) => (n.overcommitted_s !== null ? `for ${formatSpan(n.overcommitted_s)} now` : n.overcommit_count ? `not now; ${count(n.overcommit_count, "time")} since the start of the scheduler` : "never");

// What the node has, and what takes it.
function ledger(n) {
  const rows = Object.keys(n.capacity).filter((name) => [n.capacity, n.usage, n.foreign_usage].some((amounts) => amounts[name]));
  // The scheduler knows each job's CPU; of other resources only what all jobs take.
  const sum = (name, of) => (name === "cpu" ? n.jobs.reduce((total, job) => total + (of(job) ?? 0), 0) : null);
  const show = (name, value) => (value === null ? "–" : name === "memory" ? bytes(value) : name === "cpu" ? fixed(value) : number(value));
  const right = (title, help, value) => ({ title, help, align: "right", cell: (name) => show(name, value(name)) });
  return h("section.card", { key: "ledger", "aria-labelledby": "ledger" }, h("h2", { id: "ledger" }, "Resources"), table({
    caption: `Resources of node ${n.id} and their use`, rows, rowKey: (name) => name, empty: "It offers no resources.", columns: [
      { title: "Resource", cell: (name) => NAMES[name] ?? name },
      right("Capacity", "All that the node has", (name) => n.capacity[name] ?? 0),
      right("Requested", "Requests of the scheduler's jobs", (name) => sum(name, (job) => job.cpu_limit)),
      right("Limits", "Limits of the scheduler's jobs: the most that they may use now", (name) => n.usage[name] ?? 0),
      right("Used", "Their recent usage", (name) => sum(name, (job) => job.cpu_usage ?? job.smoothed_cpu_usage)),
      right("Foreign", "Limits of jobs that are not this scheduler's", (name) => n.foreign_usage[name] ?? 0),
      { title: "Free", align: "right", help: "Capacity minus limits and foreign jobs; negative: overcommitted",
        cell: (name) => ((n.free[name] ?? 0) < 0 ? badge(`${show(name, n.free[name])}: overcommitted`, "warn") : show(name, n.free[name] ?? 0)) },
    ],
  }));
}

const graph = (history, marks) => ({
  ...axis(history, marks), title: "CPU in cores", format: formatCores, height: 240,
  series: [line(history, "used_cores", "used", "--c1", { fill: true }), line(history, "limit_cores", "limits", "--c2", { step: true }),
    line(history, "ordered_cores", "requested", "--c7", { dash: true }), line(history, "capacity_cores", "capacity", "--c5", { dash: true })],
});
