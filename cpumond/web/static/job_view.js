// One job as its agent explains it: why its limit is what it is, graphs, votes, decisions, options. For the page of
// the scheduler and that of the agent.

import { chart } from "./chart.js";
import { h } from "./dom.js";
import { capital, isKnown, localTimes, measured, number, formatCores, formatOption, formatRatio, formatVotes, time } from "./format.js";
import { badge, bar, facts, table } from "./table.js";
import { working } from "./history.js";
import { markDecisions } from "./marks.js";

const SHOWN_DECISIONS = 20;
const MAX_OPTION = 200;

// All of an explain answer `e`; `key` identifies the job; `marks` are further events of its graphs.
export const jobView = (e, key, app, marks = []) => [
  h("p.why-limit", { key: "why" }, localTimes(e.why).replace(e.job_id, "this job") || "The agent of this node is an older version, which reports figures without reasons: upgrade it."),
  jobGraphs(e, key, marks),
  e.peak ? peakCard(e) : votesCard(e),
  decisionsCard(e, app),
  h("section.card", { key: "facts", "aria-labelledby": "behind" }, h("h2", { id: "behind" }, "Inputs of the limit"),
    facts(Object.entries(e.facts ?? {}).map(([name, text]) => [capital(name), localTimes(text)]))),
  optionsCard(e),
];

// ---- graphs

function jobGraphs(e, key, marks) {
  const samples = e.samples;
  if (!samples) return h("p.note", { key: "graphs" }, "The agent of this node keeps no samples: [web] samples is 0 in its configuration.");
  const times = samples.at;
  const [changes, restores] = placeDecisions(e, times);
  const shared = working([...marks, ...markDecisions(e, measured, goToDecisions)]);
  const line = (label, values, color, more = {}) => ({ label, values, color, ...more });
  return h("div.graphs", { key: "graphs" },
    h("section.card", { key: "cores" }, chart(`cores-${key}`, {
      ...shared, title: "CPU in cores", times, format: formatCores, height: 260, empty: "No points yet: the first comes within a moment.",
      series: [
        line("used", samples.usage, "--c1", { fill: true }),
        ...(e.peak ? [] : [line("smoothed", samples.smoothed, "--c3")]),
        line(e.mode === "shadow" ? "limit it would have" : "limit", samples.limit, "--c2", { step: true, width: 2.25 }),
        line("requested", times.map(() => e.cpu_limit), "--c7", { dash: true }),
        line("floor", samples.floor, "--c5", { dash: true }),
        ...(e.peak ? peakLines(e, samples, line) : [
          line("lower bound", samples.lower_bound, "--c6", { dash: true }),
          line("upper bound", samples.upper_bound, "--c4", { dash: true })]),
        line("changes written", changes, "--text", { points: true, width: 0, size: 4 }),
        ...(restores.some((value) => value !== null) ? [line("restored at once", restores, "--bad", { points: true, width: 0, size: 8 })] : []),
      ],
    })),
    h("div.grid2", { key: "votes" },
      e.peak ? null : h("section.card", chart(`votes-${key}`, { ...shared, ...votesChart(times, samples.votes_sum, e.window.threshold) })),
      h("section.card", chart(`throttled-${key}`, { ...shared, ...throttledChart(times, samples.throttled_ratio) }))));
}

// The peak that the rule remembers, and the same with the reserve: the limit that the rule asks for.
function peakLines(e, samples, line) {
  const reserve = e.job_cpu_monitor.reserve_ratio ?? 0;
  const peaks = samples.peak ?? samples.at.map(() => null);
  return [
    line("peak", peaks, "--c3"),
    line(`peak and reserve of ${number(100 * reserve, 6)} %`, peaks.map((peak) => (isKnown(peak) ? peak * (1 + reserve) : null)), "--c4",
      { dash: true }),
  ];
}

export function votesChart(times, votes, threshold) {
  const lines = isKnown(threshold) ? [
    { label: `grows above +${threshold}`, values: times.map(() => threshold), color: "--c2", dash: true },
    { label: `shrinks below -${threshold}`, values: times.map(() => -threshold), color: "--c3", dash: true }] : [];
  return {
    title: "Sum of the votes", times, height: 170, format: (value) => formatVotes(Math.round(10 * value) / 10), min: -((threshold ?? 4) + 1),
      max: (threshold ?? 4) + 1,
    series: [{ label: "sum of the votes", values: votes, color: "--c1", step: true }, ...lines],
  };
}

export const throttledChart = (times, ratios) => ({
  title: "Throttled periods", times, height: 170, format: (value) => formatRatio(value), max: 0.1,
  series: [{ label: "throttled periods", values: ratios, color: "--bad", fill: true }],
});

// Changes that were written, at the nearest sample: [all but fast restores, fast restores], null where there is none.
function placeDecisions(e, times) {
  const changes = times.map(() => null);
  const restores = times.map(() => null);
  const reach = 2 * (e.samples.period_s || 1);
  for (const decision of e.decisions) {
    if (decision.result !== "applied") continue;
    let index = times.findIndex((at) => at >= decision.at - 0.001);
    if (index < 0) index = times.length - 1;
    if (index < 0 || Math.abs(times[index] - decision.at) > reach) continue;
    (decision.kind === "restore" ? restores : changes)[index] = decision.applied_cores;
  }
  return [changes, restores];
}

// ---- votes

function votesCard(e) {
  const { window: w, job_cpu_monitor: c } = e;
  return h("section.card", { key: "window", "aria-labelledby": "window" }, h("h2", { id: "window" }, "Votes for the next decision"),
    w.meaning ? h("p.plain-text", capital(w.meaning), ".") : null,
    w.votes.length ? h("ol.votes", { "aria-label": "Votes of the window, the oldest first" }, w.votes.map((vote, index) => {
      const value = w.values[index];
      const about = c.vote_mode === "ytsaurus" ? "" : isKnown(value) ? `smoothed ${value.toFixed(3)}` : "throttled";
      return h("li.vote", { class: vote < 0 ? "down" : vote > 0 ? "up" : "" }, h("strong", formatVotes(vote)),
        about ? h("span.vote-value", about) : null);
    })) : h("p.muted.plain-text", "None yet."),
    nextCheck(e));
}

const nextCheck = (e) => (e.next ? h("p.plain-text", h("strong", "Next check: "), e.next, ".") : null);

// ---- what rule peak knows

function peakCard(e) {
  const p = e.peak;
  const used = p.throttle_budget > 0 ? p.held_ratio / p.throttle_budget : p.held_ratio > 0 ? 1 : 0;
  return h("section.card", { key: "window", "aria-labelledby": "window" }, h("h2", { id: "window" }, "Throttled time and its budget"),
    h("p.plain-text.budget", bar(used, `${formatRatio(used)} used`, { color: used > 1 ? "--bad" : "--c2" }), " ", e.facts?.["held back"] ?? ""),
    nextCheck(e));
}

// ---- decisions

function goToDecisions(event) {
  event.preventDefault();
  const heading = document.getElementById("decisions");
  heading.scrollIntoView({ block: "start" });
  heading.focus({ preventScroll: true });
}

function decisionsCard(e, app) {
  const all = [...e.decisions].reverse();
  const shown = app.local.allDecisions ? all : all.slice(0, SHOWN_DECISIONS);
  const change = (decision) => {
    const applied = decision.result === "applied" && !isSame(decision.applied_cores, decision.new_cores);
    return `${measured(decision.old_cores)} → ${measured(decision.new_cores)}${applied ? ` (applied as ${measured(decision.applied_cores)})` : ""}`;
  };
  return h("section.card", { key: "decisions", "aria-labelledby": "decisions" }, h("h2", { id: "decisions", tabindex: "-1" }, "Decisions"),
    table({
      caption: "Decisions about the limit, the newest first", rows: shown, rowKey: (d) => `${d.at}-${d.kind}-${d.new_cores}-${d.result}`,
      empty: "No decision yet: the agent has not changed this job's limit.",
      columns: [
        { title: "When", cell: (d) => time(d.at) },
        { title: "Kind", cell: (d) => badge(d.kind, { grow: "warn", restore: "bad", shrink: "good" }[d.kind] ?? "") },
        { title: "Limit, cores", align: "right", cell: change },
        { title: "Used", align: "right", cell: (d) => measured(d.usage_cores) },
        { title: "Smoothed", align: "right", cell: (d) => measured(d.smoothed_cores) },
        { title: "Votes", align: "right", cell: (d) => formatVotes(d.votes_sum) },
        { title: "Result", cell: (d) => badge(d.result, { applied: "", failed: "bad", contested: "bad" }[d.result] ?? "warn") },
        { title: "Why", cell: (d) => d.reason ?? "" },
      ],
    }),
    all.length > shown.length ? h("div", h("button", {
      type: "button", onclick: () => { app.local.allDecisions = true; app.redraw(); },
    }, `Show all ${all.length}`)) : null);
}

const isSame = (a, b) => a === b || (isKnown(a) && isKnown(b) && Math.abs(a - b) < 0.005);

// ---- options

const optionsCard = (e) => h("section.card", { key: "options", "aria-labelledby": "options" },
  h("h2", { id: "options" }, h("code", "job-cpu-monitor"), " in force on this node"),
  facts(Object.entries(e.job_cpu_monitor).map(([name, value]) => [name, h("code", formatOption(name, value).slice(0, MAX_OPTION))])));
