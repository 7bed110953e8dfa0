// One job of the scheduler: what the scheduler knows of it, and what the agent of its node says.

import { jobActions } from "./actions.js";
import { get, path, query, request, serverNow } from "./api.js";
import { chart } from "./chart.js";
import { h, skeleton, visible } from "./dom.js";
import { amount, bytes, capital, duration, isKnown, jobName, number, formatCores, formatSpan, time, withoutIds } from "./format.js";
import { axis, column, DAY_S, line, rangeButtons, readLife, remember } from "./history.js";
import { jobView, throttledChart, votesChart } from "./job_view.js";
import { readMarks } from "./marks.js";
import { JOB_TONES } from "./page_operation.js";
import { to } from "./route.js";
import { badge, facts } from "./table.js";

const LIVING = new Set(["starting", "running", "stopping"]);
const EXPLAIN_MS = 1800;
const OLD_S = 6;
const LOG_MS = 10000;
const MAY_MS = 10000;
const LOG_BYTES = 16384;
const PATIENCE_MS = 600;

export const job = {
  title: ({ job: id }, data) => capital(jobName(data?.job ?? { id })) + (data?.title ? ` of ${data.title}` : ""),
  async load({ operation, job: id }, { signal }) {
    const where = path`/operations/${operation}/jobs/${id}`;
    const found = await get(where, { signal });
    const isLiving = LIVING.has(found.state);
    const explain = isLiving ? await remember(`${where}/explain`, EXPLAIN_MS, () => get(`${where}/explain`), PATIENCE_MS) : null;
    // The scheduler's coarser points, for a job about which no agent answers.
    const history = explain?.value && !explain.error ? null
      : await readLife({ kind: "job", name: id }, found.start_time, isLiving ? null : found.finish_time ?? found.start_time, PATIENCE_MS);
    // Asked for where it would be refused, a log would be in the audit log each time.
    const { may = {}, title = "" } = (await remember(`${operation}/may`, MAY_MS, () => get(path`/operations/${operation}`))).value ?? {};
    const logs = found.state === "starting" || may.read_secrets ? {} : Object.fromEntries(await Promise.all(["stdout", "stderr"].map(async (stream) => [stream,
      await remember(`${where}/log/${stream}`, LOG_MS, () => readLog(where, stream), PATIENCE_MS)])));
    const marks = (await readMarks({ operation }, ["preemption", "limit_contested"])).filter((mark) => mark.job === found.id);
    return { job: found, isLiving, explain, history, logs, may, title, marks };
  },
  view({ job: j, isLiving, explain, history, logs, may, title, marks }, { operation }, app) {
    const answer = explain?.value;
    const key = j.id;
    return [
      h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: "#/operations" }, "Operations"),
        h("a", { href: to("operations", operation), title: operation }, title || operation),
        h("a", { href: to("operations", operation, { tab: "jobs" }) }, "Jobs"), h("span.mono.whole", j.id)),
      h("div.heading", h("h1", capital(jobName(j))), badge(j.state, JOB_TONES[j.state]),
        h("div.actions", jobActions(may, j, app, Boolean(answer) && isPinned(answer)))),
      h("section.card", { key: "job-facts", "aria-labelledby": "job-facts" }, h("h2", { id: "job-facts" }, "Facts"), facts(jobFacts(j))),
      j.state === "starting" ? null : logCard(logs, may.read_secrets),
      // Only the span is said: how long the node is silent, before it, changes with each answer.
      isLiving && explain.error && explain.error.status !== 0 ? h("p.note", { key: "refusal" }, sentence(explain.error.message), " ",
        h("span", { role: "status" }, answer ? `This is the agent's response of ${time(explain.at)}.` : "Below is the scheduler's record of it.")) : null,
      isOld(explain) ? h("p.note", { key: "old", role: "status" },
        `This is the agent's response of ${time(explain.at)}; the next one has not arrived yet.`) : null,
      isLiving && !answer && !explain.error ? h("p.note", { key: "asking", role: "status" }, "Asking the agent of its node …") : null,
      answer && !history ? h("div.page", { key: "view" },
        h("div.heading", { key: "range" }, h("h2", "Over time"), rangeButtons(app, 0)), jobView(answer, key, app, marks)) : [
        h("div.heading", { key: "range" }, h("h2", "Over time"), isLiving ? null : h("span.muted", "from its start to its end"), rangeButtons(app, isLiving ? DAY_S : 0)),
        h("div.graphs", { key: "history" }, oldGraphs(j, history, marks)),
        answer ? h("div.page", { key: "view" }, jobView(answer, key, app)) : null,
      ],
    ];
  },
};

const isOld = (explain) => explain?.value && !explain.error && serverNow() - explain.at > OLD_S;
const isPinned = (e) => e.pinned_cpu_limit !== null || e.override_left_s !== null || e.status === "contested";
const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

function jobFacts(j) {
  const ended = j.finish_time !== null;
  return [
    ["Node", h("a", { href: to("nodes", j.node_id) }, j.node_id)],
    ["Tree, task", `${j.tree}, ${j.task}`],
    j.cgroup ? ["Cgroup", h("span.mono", j.cgroup)] : null,
    ["Started", `${time(j.start_time)} (${duration((j.finish_time ?? serverNow()) - j.start_time)}${ended ? " long" : " ago"})`],
    ended ? ["Ended", time(j.finish_time)] : null,
    j.exit_code === null ? null : ["Exit code", String(j.exit_code)],
    ["Class", j.class],
    isKnown(j.backfill_until) ? ["Backfilled", `on resources reserved for a gang; expected to end by ${time(j.backfill_until)}`] : null,
    ["Requested", amount("cpu", j.cpu_limit)],
    ["Ceiling", j.has_ceiling ? "its request" : "none"],
    [ended ? "Last limit" : "Limit now", amount("cpu", j.current_cpu_limit)],
    isKnown(j.cpu_usage) ? ["Used", amount("cpu", j.cpu_usage)] : null,
    isKnown(j.smoothed_cpu_usage) ? ["Smoothed use", amount("cpu", j.smoothed_cpu_usage)] : null,
    isKnown(j.min_cpu_limit) ? ["Floor", amount("cpu", j.min_cpu_limit)] : null,
    isKnown(j.votes_sum) ? ["Sum of the votes", String(j.votes_sum)] : null,
    j.cpu_monitor_mode ? ["Mode", j.cpu_monitor_mode] : null,
    j.preemptibility ? ["Preemptibility", j.preemptibility.replaceAll("_", " ")] : null,
    isKnown(j.spared_until) && j.spared_until > serverNow() ? ["Not preempted before", time(j.spared_until)] : null,
    isKnown(j.checkpoint_at) ? ["Last checkpoint", time(j.checkpoint_at)] : null,
    j.preemption?.lost_core_seconds ? ["Work lost", `${number(j.preemption.lost_core_seconds / 3600, 3)} core-hours`] : null,
    ["CPU time", cpuTime(j)],
    isKnown(j.max_memory) ? ["Most memory", bytes(j.max_memory)] : null,
    j.reason ? ["Reason", h("span", { title: j.reason }, withoutIds(j.reason), j.preemption ? [" (",
      h("a", { href: to("preemptions", { operation: j.operation_id }) }, "preemptions"), ")"] : null)] : null,
  ];
}

function cpuTime(j) {
  if (!isKnown(j.cpu_seconds)) return "not known yet";
  const others = ["reclaimed", "throttled", "late"].map((name) => [name, j[`${name}_cpu_seconds`]]).filter(([, seconds]) => seconds);
  return `${number(j.cpu_seconds, 4)} core-seconds used${others.map(([name, seconds]) => `, ${number(seconds, 4)} ${name}`).join("")}`;
}

// The graphs from the scheduler's history: means over intervals.
function oldGraphs(j, history, marks) {
  const shared = axis(history, marks);
  const spacing = history.periodS ? `, a point every ${formatSpan(history.periodS)}` : "";
  return [
    h("section.card", { key: "cores" }, chart(`old-cores-${j.id}`,
      { ...shared, title: `CPU in cores${spacing}`, format: formatCores, height: 260, series: [
      line(history, "usage_cores", "used", "--c1", { fill: true }), line(history, "smoothed_cores", "smoothed", "--c3"),
      line(history, "current_cpu_limit_cores", "limit", "--c2", { step: true, width: 2.25 }),
      line(history, "cpu_limit_cores", "requested", "--c7", { dash: true }), line(history, "floor_cores", "floor", "--c5", { dash: true })] })),
    h("div.grid2", { key: "votes" },
      h("section.card", chart(`old-votes-${j.id}`, { ...shared, ...votesChart(history.times, column(history, "votes_sum"), null) })),
      h("section.card", chart(`old-throttled-${j.id}`, { ...shared, ...throttledChart(history.times, column(history, "throttled_ratio")) }))),
  ];
}

// ---- its log

async function readLog(where, stream) {
  const address = `/api/v1${where}/log${query({ stream, tail: LOG_BYTES })}`;
  const { text, headers } = await request("GET", address, undefined, { isText: true });
  const total = Number(headers.get("X-Cpumond-Total-Bytes"));
  return { text: visible(text), total: Number.isFinite(total) ? total : null };
}

const logCard = (logs, refusal) => h("section.card", { key: "logs", "aria-labelledby": "logs" }, h("h2", { id: "logs" }, "Log"),
  refusal ? h("p.muted.plain-text", sentence(refusal)) : null,
  h("div.grid2", Object.entries(logs).map(([stream, { value, error }]) => h("div.log", { key: stream },
    h("h3", stream), value ? [
      value.total > LOG_BYTES ? h("p.muted.plain-text", `The last ${bytes(LOG_BYTES)} of ${bytes(value.total)}.`) : null,
      value.text ? h("div.log-text", { tabindex: "0", role: "region", "aria-label": `End of ${stream}` },
        h("pre", value.text)) : h("p.muted.plain-text", "Nothing."),
    ] : error ? h("p.muted.plain-text", sentence(error.message)) : skeleton()))));
