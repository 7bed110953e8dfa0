// One operation: its state and shares, why it has them, its jobs, its specification.

import { operationActions } from "./actions.js";
import { get, path, query, serverNow } from "./api.js";
import { chart } from "./chart.js";
import { h, skeleton } from "./dom.js";
import { eventsSection, readEvents } from "./events.js";
import { selectFilter } from "./filters.js";
import { allAmounts, amount, amounts, capital, count, duration, evenly, hasAny, jobName, number, percent, share, formatCores, formatOption, formatSpan, time, withoutIds } from "./format.js";
import { axis, chosenTab, DAY_S, line, rangeButtons, readLife, remember, tabs } from "./history.js";
import { changeButton } from "./idle.js";
import { readMarks } from "./marks.js";
import { describePart, isLate, pager, predicted, stateBadge } from "./page_operations.js";
import { preemptionsTable } from "./page_preemptions.js";
import { readRights, ROOT } from "./rights.js";
import { currentQuery, to } from "./route.js";
import { badge, bar, facts, operationLink, table } from "./table.js";

const TABS = [["overview", "Overview"], ["why", "Why"], ["jobs", "Jobs"], ["events", "Events"], ["specification", "Specification"]];
const JOB_STATES = ["starting", "running", "stopping", "completed", "failed", "aborted", "lost"];
export const JOB_TONES = { running: "good", starting: "", stopping: "warn", completed: "", failed: "bad", aborted: "warn", lost: "bad" };
const PAGE = 50;
const PATIENCE_MS = 500;
const WHY_MS = 4000;

export const operation = {
  title: ({ operation: id }, data) => data?.operation.title || `Operation ${id.split("-")[0]}`,
  async load({ operation: id }, { signal, query: chosen }) {
    const tab = chosenTab(TABS);
    const found = await get(path`/operations/${id}`, { signal });
    const data = { operation: found, tab };
    if (tab === "overview") {
      data.history = await readLife({ kind: "operation", name: found.id }, found.start_time, found.finish_time, PATIENCE_MS);
      data.newest = (await remember(`${found.id}/newest`, WHY_MS, () => get(path`/operations/${id}/jobs` + query({ state: found.jobs.failed ? "failed" : "", limit: 1 })), PATIENCE_MS)).value?.jobs[0];
      data.marks = await readMarks({ operation: found.id }, ["preemption", "node_lost", "operation_failed", "operation_stuck", "limit_contested", "command"]);
    }
    if (tab === "why") data.why = await get(path`/operations/${id}/why`, { signal });
    if (tab === "overview" || tab === "why") data.idle = isHindered(found) ? await readIdle(found) : {};
    if (tab === "jobs") {
      data.offset = Math.max(Math.trunc(Number(chosen.get("offset"))) || 0, 0);
      data.asked = chosen.get("job_state") ?? "";
      data.jobs = await get(path`/operations/${id}/jobs` + query({ state: data.asked, limit: PAGE,
        offset: data.offset || null }), { signal });
    }
    if (tab === "events") [data.events, data.rights] = await Promise.all([readEvents({ operation: found.id }), readRights()]);
    // Asked for where it would be refused, it would be in the audit log each time.
    if (tab === "specification" && !found.may?.read_secrets) data.specification = await get(path`/operations/${id}/specification`, { signal });
    return data;
  },
  view(data, _, app) {
    const { operation: o } = data;
    const parts = { overview, why, jobs, events, specification };
    const now = chosenTab(TABS);
    return [
      h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: "#/operations" }, "Operations"), h("span.mono.whole", o.id)),
      h("div.heading", h("h1.title", { title: o.title || null }, o.title || `Operation ${o.id.split("-")[0]}`), stateBadge(o), h("div.actions", operationActions(o, app))),
      o.error ? h("p.error.framed", o.error) : null,
      o.alerts.map((sentence) => h("p.note", sentence)),
      tabs("Parts of this page", TABS, app),
      now === data.tab ? h("div.page", { key: now }, parts[now](data, app)) : skeleton({ key: "loading" }),
    ];
  },
};

// ---- your turn: when it starts or why it does not, and the change that would let it

const isHindered = (o) => o.finish_time === null && (o.state === "pending" || o.suspended || o.jobs.pending > 0
  || Object.values(o.trees).some((part) => part.starvation_status !== "non_starving"));

// Why CPU of its pools stands idle, by tree: the causes there have the changes.
const readIdle = async (o) => Object.fromEntries(await Promise.all(Object.entries(o.pools).map(async ([tree, pool]) => [tree,
  (await remember(`idle/${tree}/${pool}`, WHY_MS, () => get(path`/trees/${tree}/why` + query({ pool })), PATIENCE_MS)).value])));

function turn(o, idle, app, link = null) {
  const parts = Object.entries(o.trees).filter(([, part]) => part.cause !== "working");
  return h("section.card.turn", { key: "turn", "aria-labelledby": "turn" }, h("h2", { id: "turn" }, "Your turn"), h("p.flat", h("strong", turnText(o))),
    parts.map(([tree, part], index) => h("p.flat", { key: tree }, `${parts.length > 1 ? `Tree ${tree}: ` : ""}${capital(part.why.replace(/^cannot/, "it cannot"))}. `,
      remedy(o, tree, part, idle, app), index ? null : link)));
}

function remedy(o, tree, part, idle, app) {
  if (part.cause === "cannot_start") return "Remedy: start it again with smaller jobs, or add nodes that hold them. ";
  const cause = idle[tree]?.causes.find(({ operations }) => operations.includes(o.id));
  const why = cause?.why.startsWith("they ") ? "" : `${cause?.why}; `; // of the cores that are idle
  if (cause) return [`Remedy: ${why}${withoutIds(cause.change.text)}. `, changeButton(tree, cause, app), " "];
  const pool = /^(?:pool_full|limit):(.+)/.exec(part.cause)?.[1];
  return pool ? ["Remedy: wait, or raise the limit of ", h("a", { href: to("pools", tree, pool) }, `pool ${pool}`), ". "] : null;
}

function turnText({ forecast, shown_state: state, suspended, jobs }) {
  if (state === "cannot start") return "It never starts as it is.";
  if (suspended) return "It starts no more jobs until it is resumed.";
  if (jobs.active) return `${count(jobs.active, "job")} active, ${jobs.pending ? number(jobs.pending, 6) : "none"} still to start.`;
  if (!forecast || forecast.start_p10 === null) return "It waits; when it starts is not predicted yet.";
  if (isLate(forecast)) return "It is late: by the last prediction it should have started.";
  const { start_p10: first, start_p50: middle, start_p90: last } = forecast;
  if (middle === null) return "It does not start soon: most simulations end before it starts.";
  return `It starts at about ${time(middle)}, in ${duration(Math.max(middle - serverNow(), 0))} (${last === null ? `at ${time(first)} at the earliest` : `in eight of ten simulations from ${time(first)} to ${time(last)}`}).`;
}

// ---- overview

const overview = ({ operation: o, history, idle, marks, newest }, app) => [
  isHindered(o) ? turn(o, idle, app, h("a", { href: to("operations", o.id, { tab: "why" }) }, "Why?")) : null,
  h("section.card", { key: "facts", "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "Facts"), facts([
    o.alias ? ["Alias", o.alias] : null,
    ["User", o.user],
    ["Started", `${time(o.start_time)} (${duration((o.finish_time ?? serverNow()) - o.start_time)}${o.finish_time ? " long" : " ago"})`],
    o.finish_time ? ["Ended", time(o.finish_time)] : null,
    o.forecast?.end_p50 ? ["Ends", predicted(o.forecast, "end")] : null,
    ["Jobs", describeJobs(o.jobs)],
    newest ? ["Log", h("a", { href: to("operations", o.id, "jobs", newest.id) }, `of ${newest.state === "failed" ? "the failed " : ""}${jobName(newest)}`)] : null,
    ["CPU time", `${number(o.cpu_seconds, 4)} core-seconds used${o.reclaimed_cpu_seconds ? `, ${number(o.reclaimed_cpu_seconds, 4)} reclaimed` : ""}`],
    o.is_gang ? ["Gang", "yes: its jobs start all together or not at all, and its fair share is its whole demand or nothing"] : null,
    ...o.incarnations.slice(-1).map((incarnation) => ["Incarnation", `${incarnation.id}, since ${time(incarnation.at)}${incarnation.reason ? `: ${incarnation.reason.replaceAll("_", " ")}` : ""}`]),
    ...o.retried.slice(-3).map((note) => ["Retry rule", note]),
    o.next_retry === null ? null : ["Next retry", time(o.next_retry)],
    o.allow_reclaimed ? null : ["Reclaimed CPU", "refused: its jobs start only on CPU that no ordinary job requested"],
    o.require_reclaimed ? ["Reclaimed CPU", "required: its jobs yield to all others"] : null,
  ])),
  ...Object.entries(o.pools).map(([tree, pool]) => treeCard(o, tree, pool)),
  h("div.heading", { key: "range" }, h("h2", "Over time"),
    o.finish_time === null ? null : h("span.muted", "from its start to its end"), rangeButtons(app, o.finish_time === null ? DAY_S : 0)),
  graphs(o, history, marks),
  tasks(o),
];

function describeJobs(jobs) {
  const ended = Object.entries({ failed: jobs.failed, aborted: jobs.aborted, lost: jobs.lost }).filter(([, value]) => value);
  return [`${jobs.completed} of ${jobs.total} completed`, `${jobs.active} active`, `${jobs.pending} to start`,
    ...ended.map(([word, value]) => `${value} ${word}`)].join(", ");
}

function treeCard(o, tree, pool) {
  const part = o.trees[tree];
  const id = `tree-${tree}`;
  const heading = h("h2", { id }, "Pool ", h("a", { href: to("pools", tree, pool) }, pool), " of tree ", h("a", { href: to("pools", tree) }, tree));
  if (!part) return h("section.card", { key: id, "aria-labelledby": id }, heading,
    h("p.muted.plain-text", "It has ended and has no share any more."));
  const state = describePart(part);
  const starves = part.starves_in_s !== null && part.starvation_status === "non_starving" ? `starves in ${formatSpan(part.starves_in_s)}` : "";
  return h("section.card", { key: id, "aria-labelledby": id }, heading, facts([
    ["Fair share", [bar(part.fair_share_ratio, share(part.fair_share_ratio, part.fair_share_resource), { color: "--c2" }), h("div", amounts(part.fair_share))]],
    ["Allocated", [bar(part.usage_ratio, share(part.usage_ratio, part.usage_resource)), h("div", amounts(part.usage))]],
    ["Demand", amounts(part.demand)],
    ["Satisfaction", part.satisfaction_ratio === null ? "–" : h("span",
      { title: "Allocated resources relative to its fair share" }, percent(part.satisfaction_ratio))],
    ["Status", state ? badge(state, part.queue_place === null || part.cause === "cannot_start" ? "bad" : "warn") : starves ? badge(starves, "warn")
      : part.usage_ratio === 0 && part.fair_share_ratio === 0 ? badge(hasAny(part.demand) ? "no share here" : "no demand here")
      : part.scheduling_status === "normal" ? badge("at its fair share", "good") : badge(part.scheduling_status.replaceAll("_", " "), "warn")],
    ["Jobs here", count(part.job_count, "job")],
    ["Weight", number(part.weight)],
    Object.keys(part.limits).length ? ["Limits", allAmounts(part.limits)] : null,
    part.scheduling_tag_filter ? ["Only on nodes with", part.scheduling_tag_filter] : null,
  ]));
}

function graphs(o, history, marks) {
  const shared = { ...axis(history, marks), height: 220 };
  return h("div.grid2", { key: "graphs" },
    h("section.card", chart(`shares-${o.id}`, { ...shared, title: "Allocated, demand and fair share", format: percent, series: [
      line(history, "usage_ratio", "allocated", "--c1", { fill: true }), line(history, "demand_ratio", "demand", "--c3"),
      line(history, "fair_share_ratio", "fair share", "--c2", { step: true })] })),
    h("section.card", chart(`cores-${o.id}`, { ...shared, title: "CPU in cores", format: formatCores, series: [
      line(history, "used_cores", "used", "--c1", { fill: true }), line(history, "limit_cores", "limit", "--c2", { step: true }),
      line(history, "ordered_cores", "requested", "--c7", { dash: true }), line(history, "reclaimed_cores", "reclaimed", "--c3")] })));
}

const tasks = (o) => h("section.card", { key: "tasks", "aria-labelledby": "tasks" }, h("h2", { id: "tasks" }, "Tasks"), table({
  caption: "Tasks and the states of their ended jobs", rows: o.tasks, rowKey: (task) => task.name, empty: "It has no tasks.", columns: [
    { title: "Task", cell: (t) => t.name },
    { title: "Jobs", align: "right", cell: (t) => number(t.job_count, 6) },
    { title: "Requests per job", cell: (t) => amounts({ cpu: t.cpu_limit ?? 1, memory: t.memory_limit ?? 0, gpu: t.gpu_limit ?? 0 })
      + (t.memory_reserve ? ` (${amounts({ memory: t.memory_reserve })} reserved)` : "") },
    ...["completed", "failed", "aborted", "lost"].map((name) => ({ title: capital(name), align: "right",
      cell: (t) => number(o.counts[t.name]?.[name] ?? 0, 6) })),
    { title: "Command", cell: (t) => h("code.long", { title: commandOf(t) }, commandOf(t)) },
  ],
}));

const commandOf = (task) => (Array.isArray(task.command) ? task.command.join(" ") : task.command ?? "");

// ---- why

const why = ({ operation: o, why: answer, idle }, app) => [
  o.finish_time === null ? turn(o, idle, app) : h("section.card", { key: "all" }, lines(answer.lines)),
  ...answer.trees.map((part) => h("section.card", { key: `tree-${part.tree}` },
    h("h2", "In pool ", h("a", { href: to("pools", part.tree, part.pool) }, part.pool), ` of tree ${part.tree}`),
    part.path.length ? way(o, part) : null, h("details", h("summary", "Line by line"), lines(part.lines)))),
  o.finish_time === null && answer.lines.length > 1 ? h("section.card", { key: "all" }, h("h2", "What happened to it"), lines(answer.lines.slice(1))) : null,
  preempted("Its preempted jobs", answer.preempted, "Operation"),
  preempted("Jobs preempted for it", answer.preempted_for_it, "For"),
];

// Spaces at the beginning of a line are its indentation.
const lines = (texts) => h("ul.why", texts.map((text) => h("li", { style: { "margin-left": `${text.search(/\S|$/) / 2}em` } }, withoutIds(text))));

const SHARE_PARTS = [["strong", "strong guarantee"], ["integral", "integral guarantee"], ["by_weight", "by weight"], ["rest", "demanded, not given"]];

// The fair share of each pool from the root down to the operation, as a bar as long as its demand.
function way(o, part) {
  const last = part.path.length - 1;
  const cutAt = part.path.findLastIndex(({ cut }) => cut);
  const of = ({ resource, share: has, demand }) => (resource === "cpu" ? evenly([has, demand]).join(" of ") + " cores" : `${amount(resource, has)} of ${amount(resource, demand)}`);
  const why = ({ cut, share: has, demand }, index) => cut || (has >= demand * 0.999 ? "" : cutAt >= 0 && index > cutAt ? "cut off by a pool above" : "cut off below it");
  return [
    h("h3", "How its fair share comes about"),
    h("ol.way", part.path.map((step, index) => {
      const whole = Math.max(step.demand, step.share) || 1;
      return h("li", { key: step.name }, h("span.way-name", index === last ? h("strong", o.title || "This operation") : h("a", { href: to("pools", part.tree, index ? step.name : ROOT) }, index ? step.name : "Root pool")),
        h("span.stack", { "aria-hidden": "true" }, SHARE_PARTS.slice(0, -1).map(([name]) => h("span", { key: name, class: name, style: { width: `${(100 * step[name] / whole).toFixed(2)}%` } }))),
        h("span.way-line", of(step),
          h("span.hidden-text", `: ${SHARE_PARTS.slice(0, -1).map(([name, word]) => `${word} ${amount(step.resource, step[name])}`).join(", ")}`),
          why(step, index) ? h("span.muted", `: ${withoutIds(why(step, index))}`) : null));
    })),
    h("ul.glance-legend", { "aria-label": "Parts of a bar" }, SHARE_PARTS.map(([name, word]) => h("li", { key: name }, h("span.square", { class: name, "aria-hidden": "true" }), word))),
  ];
}

const preempted = (title, records, without) => (records.length ? h("section.part", { key: title }, h("h2", title), preemptionsTable(title, records, {}, { without: [without, "Lost"] })) : null);

// ---- jobs

function jobs({ operation: o, jobs: list, offset, asked }, app) {
  const found = count(list.total, asked ? `${asked} job` : "job");
  app.announce(`jobs ${asked} ${offset}`, found);
  return [
    h("div.filters", selectFilter("job_state", "State", JOB_STATES.map((name) => [name, name]), app),
      h("p.muted.plain-text.filter-count", found)),
    jobsTable(list.jobs, { caption: "Jobs of this operation",
      empty: currentQuery().get("job_state") ? "No job matches." : "No job has started yet; see the tab “Why”." }),
    pager(list.total, offset, list.jobs.length, PAGE, app),
  ];
}

// Jobs as rows; with `titles` of operations: with a link to the operation of each.
export function jobsTable(rows, { caption, empty, titles = null }) {
  const now = serverNow();
  return table({ caption, rows, rowKey: (job) => job.id, empty, columns: [
    { title: "Job", cell: (j) => h("a", { title: j.id, href: to("operations", j.operation_id, "jobs", j.id) }, jobName(j)) },
    titles ? { title: "Operation", cell: (j) => operationLink(j.operation_id, titles[j.operation_id]) } : { title: "Task", cell: (j) => j.task + (j.gang_rank < 0 ? "" : `, rank ${j.gang_rank}`) },
    titles ? null : { title: "Node", cell: (j) => h("a", { href: to("nodes", j.node_id) }, j.node_id) },
    { title: "State", cell: (j) => badge(j.state, JOB_TONES[j.state]) },
    { title: "Class", cell: (j) => j.class + (j.backfill_until === null ? "" : ", backfilled") },
    { title: "Limit of request, cores", align: "right",
      help: "The bar: the current limit relative to the request; the line in it: the smoothed usage", cell: limitBar },
    { title: "Smoothed usage", align: "right", help: "Cores", cell: (j) => (j.smoothed_cpu_usage === null ? "–" : j.smoothed_cpu_usage.toFixed(2)) },
    { title: "Time", align: "right", cell: (j) => duration((j.finish_time ?? now) - j.start_time) },
    { title: "Started", align: "right", cell: (j) => time(j.start_time) },
    titles ? { title: "Preemptibility", cell: (j) => j.preemptibility.replaceAll("_", " ") || "–" }
      : { title: "Exit code", align: "right", cell: (j) => (j.exit_code === null ? "–" : String(j.exit_code)) },
    { title: "Reason", cell: (j) => h("span.long", { title: j.reason }, withoutIds(j.reason) || "–") },
  ].filter(Boolean) });
}

function limitBar(job) {
  const used = job.smoothed_cpu_usage;
  return bar(job.current_cpu_limit / job.cpu_limit, `${formatCores(job.current_cpu_limit)} of ${formatCores(job.cpu_limit)}`,
    { color: "--c2", mark: used === null || !job.cpu_limit ? null : used / job.cpu_limit });
}

const events = ({ events: found, rights }, app) => eventsSection(found, rights, app);

// ---- specification

const SPECIFICATIONS = [["resulting", "Resulting specification"], ["provided", "Provided specification"]];

function specification({ operation: o, specification: found }, app) {
  const now = chosenTab(SPECIFICATIONS, "specification");
  if (!found) return h("p.note", o.may.read_secrets);
  return [
    tabs("Specifications", SPECIFICATIONS, app, "specification"),
    now === "provided"
      ? h("section.card", { key: now }, h("h2", "Provided specification"), h("p.muted.plain-text", "As submitted by its user."),
        h("pre", { tabindex: "0" }, pretty(found.provided)))
      : h("section.card", { key: now }, h("h2", "Resulting specification"),
        h("p.muted.plain-text", "As submitted, merged with the defaults. Nodes may have their own defaults of job-cpu-monitor."), resulting(found, o)),
  ];
}

function resulting(found, operation) {
  const { job_cpu_monitor: monitor = {}, ...rest } = found.resulting;
  const sources = found.job_cpu_monitor_sources ?? found.resulting.job_cpu_monitor_sources ?? {};
  delete rest.job_cpu_monitor_sources;
  const isGiven = (name) => sources[name] === "specification";
  return [
    h("h3", { id: "job-cpu-monitor" }, "job-cpu-monitor"),
    table({ caption: "job-cpu-monitor", rows: Object.entries(monitor), rowKey: ([name]) => name, empty: "It has no options.", columns: [
      { title: "Option", cell: ([name]) => h("code", name) },
      { title: "Value", cell: ([name, value]) => (isGiven(name) ? h("strong", h("code", formatOption(name, value)))
        : h("span", "the node's value", value === null ? null : [", else ", h("code", formatOption(name, value))])) },
      { title: "From", cell: ([name]) => (isGiven(name) ? badge("specification", "good") : badge("node")) },
    ], stacked: true }),
    h("p.muted.plain-text", "Options that the specification does not set come from the node: [monitor] in its agent's configuration, else the default. ",
      h("a", { href: to("operations", operation.id, { tab: "jobs" }) }, "The page of a job"), " shows the options in force for it."),
    h("h3", "Everything else"),
    h("pre", { tabindex: "0" }, pretty(rest)),
  ];
}

const pretty = (value) => JSON.stringify(value, null, 2);
