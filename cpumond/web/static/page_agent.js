// The jobs of one node, as its agent sees them; what `cpumond status` and `cpumond explain` print.

import { get, path } from "./api.js";
import { h } from "./dom.js";
import { duration, evenly, fixed, number, formatRatio, formatSpan, formatVotes } from "./format.js";
import { rangeButtons } from "./history.js";
import { jobView } from "./job_view.js";
import { to } from "./route.js";
import { badge, bar, bigTable, figure } from "./table.js";

const TONES = { reclaim: "good", refused: "warn", contested: "bad", overridden: "warn", pinned: "warn" };
const STUCK_PERIODS = 5;

export const agentJobs = {
  title: (_, data) => data?.node_id ?? "",
  load: (_, { signal }) => get("/status", { signal }),
  view(a) {
    const [requested, limits, reclaimed, inShadow] = evenly([a.totals.cpu_limit, a.totals.current_cpu_limit, a.totals.reclaimed, watched(a)]);
    return [
      h("div.heading", h("h1", `Node ${a.node_id}`), a.paused ? badge("paused", "warn") : null, isStuck(a) ? badge("stuck", "bad") : null),
      notices(a),
      h("section.cards.totals", { key: "totals", "aria-label": "Totals" },
        figure(number(a.jobs.length, 6), a.jobs.length === 1 ? "job" : "jobs"), figure(requested, "cores requested"),
        figure(limits, "cores of limits now"), figure(reclaimed, "cores reclaimed"), watched(a) > 0.005 ? figure(inShadow, "cores in shadow mode") : null),
      h("p.muted.plain-text", { key: "head" }, `Cgroups ${a.layout}, a check every ${duration(a.check_period_s)}, `
        + `the last took ${(1000 * a.tick_duration_s).toFixed(1)} ms. ${describeScheduler(a)}`),
      bigTable("jobs", {
        caption: "Jobs of this node", noun: "job", columns: columns(a.jobs), rows: a.jobs, rowKey: (job) => `${job.job_id} ${job.cgroup}`,
          height: "75vh",
        searchable: (job) => `${job.job_id} ${job.operation_id} ${job.cgroup} ${job.status}`,
        empty: "No jobs; see `cpumond doctor`, or add one with `cpumond job add`.",
      }),
    ];
  },
};

export const agentJob = {
  title: ({ job }) => `Job ${job}`,
  load: ({ job }, { signal }) => get(path`/jobs/${job}/explain`, { signal }),
  view: (e, _, app) => [
    h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: "#/" }, "Jobs"), h("span.mono", e.job_id)),
    h("div.heading", h("h1", `Job ${e.job_id}`), badge(e.status, TONES[e.status] ?? "")),
    e.operation_id ? h("p.plain-text", "Operation ", h("span.mono", e.operation_id)) : null,
    h("div.heading", { key: "range" }, h("h2", "Over time"), rangeButtons(app, 0)),
    ...jobView(e, e.job_id, app),
  ],
};

const isOnlyWatched = (job) => job.mode === "shadow" && !job.refused && !job.unlimited;
// What the engine of a job says of it beside what is in other columns.
const labels = (job) => (job.engine ? Object.values(job.labels) : [])
  .filter((text) => text !== job.job_id && text !== job.operation_id).join(", ");
const watched = (a) => a.jobs.filter(isOnlyWatched).reduce((sum, job) => sum + job.current_cpu_limit - job.monitor_cpu_limit, 0);
const isStuck = (a) => (a.last_tick_age_s ?? 0) > Math.max(STUCK_PERIODS * a.check_period_s, 2);

// What needs an operator's attention, as sentences.
function notices(a) {
  const { counters } = a;
  const { raise = 0, lower = 0 } = counters.foreign_writes ?? {};
  const notices = [
    isStuck(a) ? ["bad", `Stuck: the last check was ${formatSpan(a.last_tick_age_s)} ago; see the agent's log.`] : null,
    a.paused ? ["warn", "Paused: no limits are written while the pause file is in the agent's runtime_dir."] : null,
    raise || lower ? ["warn", `Foreign writes: another program raised limits ${raise} times and lowered them ${lower} times.`] : null,
    counters.write_errors ? ["bad", `Write errors: ${counters.write_errors} limits could not be written.`] : null,
    counters.shed_checks ? ["warn", `Over its CPU budget: ${counters.shed_checks} checks were skipped ([cost]).`] : null,
    ...a.problems.map((problem) => ["bad", `Problem: ${problem}`]),
    ...a.jobs.filter((job) => job.last_error).map((job) => ["bad", `Job ${job.job_id}: ${job.last_error}`]),
  ].filter(Boolean);
  if (!notices.length) return null;
  return h("ul.notices", { key: "notices", "aria-label": "Needs attention" }, notices.map(([tone, text]) => h("li", { class: tone, key: text }, text)));
}

function describeScheduler(a) {
  if (!a.scheduler) return "No scheduler is configured.";
  const where = a.scheduler.registered ? `in tree ${a.scheduler.tree ?? "(none)"}` : "not registered";
  const term = a.scheduler.term ? ` (term ${a.scheduler.term})` : "";
  const bound = a.scheduler.level ? `, allows this host ${a.scheduler.level} at most` : "";
  const text = `Node of ${a.scheduler.url}${term}: ${where}${bound}`;
  if (!a.executor) return `${text}, runs no jobs of it ([executor] kind).`;
  const states = Object.entries(a.executor.states ?? {}).filter(([, value]) => value).map(([name, value]) => `${value} ${name}`);
  return `${text}; its jobs here: ${states.join(", ") || "none now"}.`;
}

const formatPeak = (p) => (p ? `${fixed(p.peak_cores)}, ${formatSpan(p.half_life_s)}` : "");

function columns(jobs) {
  const right = (key, title, value, cell, help) => ({ key, title, value, cell, help, align: "right" });
  return [
    { key: "job", title: "Job", value: (j) => j.job_id,
      cell: (j) => h("a.mono.id", { href: to("jobs", j.job_id), title: `${j.job_id}, cgroup ${j.cgroup}` }, j.job_id) },
    jobs.some((job) => job.operation_id) ? { key: "operation", title: "Operation", value: (j) => j.operation_id,
      cell: (j) => h("span.mono.id", { title: j.operation_id || null }, j.operation_id || "–") } : null,
    jobs.some(labels) ? { key: "labels", title: "Labels", value: labels, cell: (j) => h("span.id", { title: labels(j) }, labels(j)) } : null,
    { key: "status", title: "Status", value: (j) => j.status,
      cell: (j) => h("span", { title: j.refused || null }, badge(j.status, TONES[j.status] ?? "")) },
    right("ordered", "Requested", (j) => j.cpu_limit, (j) => (j.unlimited ? "–" : fixed(j.cpu_limit)), "Cores"),
    right("limit", "Limit", (j) => j.current_cpu_limit,
      (j) => (j.unlimited ? "–" : bar(j.current_cpu_limit / j.cpu_limit, fixed(j.current_cpu_limit), { color: "--c2" })), "Cores; the bar: relative to its request"),
    jobs.some(isOnlyWatched) ? right("monitor", "(would be)", (j) => (isOnlyWatched(j) ? j.monitor_cpu_limit : null),
      (j) => (isOnlyWatched(j) ? fixed(j.monitor_cpu_limit) : ""), "The limit it would have in mode reclaim") : null,
    right("reclaimed", "Reclaimed", (j) => Math.max(j.cpu_limit - j.current_cpu_limit, 0),
      (j) => fixed(Math.max(j.cpu_limit - j.current_cpu_limit, 0)), "Requested cores that its limit withholds now"),
    right("usage", "Used", (j) => j.usage, (j) => (j.usage === null ? "–" : bar(j.usage / j.cpu_limit, fixed(j.usage))),
      "Cores in the last check; the bar: relative to its request"),
    right("smoothed", "Smoothed", (j) => j.smoothed_cpu_usage, (j) => fixed(j.smoothed_cpu_usage), "Cores"),
    jobs.some((job) => job.peak) ? right("peak", "Peak", (j) => j.peak?.peak_cores ?? null, (j) => formatPeak(j.peak),
      "Rule peak: the highest recent usage in cores, and its half-life") : null,
    jobs.length && jobs.every((job) => job.peak) ? null : right("votes", "Votes", (j) => j.votes_sum, (j) => formatVotes(j.votes_sum)),
    right("throttled", "Throttled", (j) => j.throttled_ratio, (j) => formatRatio(j.throttled_ratio), "Fraction of the periods of the last check"),
    { key: "result", title: "Last result", value: (j) => j.last_result, cell: (j) => j.last_result || "–" },
  ].filter(Boolean);
}
