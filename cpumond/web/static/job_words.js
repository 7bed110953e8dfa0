// Why a job's limit is what it is, in the words of `cpumond explain`: from an explain answer `e` to text. Pure.

const DURATIONS = new Set(["check_period", "start_delay", "restore_hold", "startup_boost", "peak_memory", "throttle_poll"]);

const KIND_REASONS = {
  "foreign-raise": "somebody else raised it",
  "foreign-lower": "somebody else lowered it",
  reapply: "brought to what is meant: another write, a reload or a restart had left something else",
  adopt: "found as an earlier run of the agent left it",
  pin: "pinned by an operator",
  mode: "its mode changed",
};

// ---- numbers

// Six significant digits.
export const plain = (value) => general(Number(value), 6);

// So many significant digits without zeros at the end, as Python's format "g": 0.5, 12, 1e-05.
function general(value, digits) {
  if (!Number.isFinite(value) || value === 0) return String(value);
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e").map(Number);
  if (exponent >= -4 && exponent < digits) return trim(roundEven(value, digits - 1 - exponent));
  return `${mantissa}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

// toFixed, but what lies just between two numbers goes to the even one, as the command line rounds: 0.8125 -> 0.812.
function roundEven(value, digits) {
  const text = value.toFixed(digits);
  const exact = value.toFixed(digits + 30);
  if (!/50{29}$/.test(exact) || !/[13579]$/.test(text)) return text;
  return exact.slice(0, digits ? -30 : -31);
}

// Up to two digits after the point, below one core three: 3.2, 10, 0.004; <0.001 for less.
export function showCores(cores) {
  if (cores === null || cores === undefined) return "no limit";
  if (cores > 0 && cores < 0.001) return "<0.001";
  const size = Math.abs(cores);
  if (size > 0 && size < 0.01) return general(cores, 2);
  return trim(roundEven(cores, size < 1 ? 3 : 2));
}

const trim = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

// Measured cores with two digits after the point, below one core with three, as the command line has them.
export const measured = (value) => fixed(value, Math.abs(value ?? 1) < 1 ? 3 : 2);

export function fixed(value, digits = 2) {
  return value === null || value === undefined ? "–" : roundEven(value, digits);
}

export function showVotes(votes) {
  if (votes === null || votes === undefined) return "–";
  return votes > 0 ? `+${votes}` : String(votes);
}

export function showRatio(ratio, digits = 0) {
  return `${roundEven(100 * (ratio ?? 0), digits)} %`;
}

// Local date and time.
export function showTime(at) {
  const date = new Date(1000 * at);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
    + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// A remaining time without fractions: 9m30s.
export function showLeft(seconds) {
  const whole = Math.max(Number(roundEven(seconds, 0)), 1);
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor((whole % 3600) / 60), "m"], [whole % 60, "s"]];
  return parts.filter(([value]) => value).map(([value, unit]) => `${value}${unit}`).join("");
}

// A time span: 0.4 s, 12 s, 3 min 5 s, 2 h 1 min, 3 d 4 h.
export function showSpan(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${Math.max(seconds, 0).toFixed(1).replace(/\.0$/, "")} s`;
  const whole = Math.round(seconds);
  for (const [size, unit, part, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor((whole % size) / part);
      return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
    }
  }
  return `${whole} s`;
}

// A value of job-cpu-monitor as people write it; durations that are numbers are milliseconds, as in the documents.
export function showOption(name, value) {
  if (value === null || value === undefined) return "–";
  if (DURATIONS.has(name) && typeof value === "number") return value % 1000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`;
  return typeof value === "string" ? value : JSON.stringify(value);
}

// ---- the answer

// One or two sentences: why the limit is what it is.
export function describeWhy(e) {
  const name = e.job_id;
  const stands = `The limit of ${name} is ${showCores(e.current_cpu_limit)} of ${showCores(e.cpu_limit)} ordered cores`;
  if (e.refused) return `${stands}: nothing is ever written to its cgroup, because ${e.refused}.`;
  if (e.status === "contested") {
    return `${stands}, as another program left it: that one changed the limit back ${e.contested_losses} times, so the `
      + `agent writes no more. End the other program's writes, then \`cpumond unpin ${name}\`.`;
  }
  if (e.override_left_s !== null && e.override_left_s !== undefined) {
    const who = e.override_by ? `${e.override_by} ordered it` : "somebody else set it";
    return `${stands}: ${who}, which is respected for ${showLeft(e.override_left_s)} more. `
      + `\`cpumond unpin ${name}\` gives it back to the monitor now.`;
  }
  if (e.pinned_cpu_limit !== null && e.pinned_cpu_limit !== undefined) {
    const until = e.pinned_until === null || e.pinned_until === undefined
      ? `until \`cpumond unpin ${name}\`` : `until ${showTime(e.pinned_until)}`;
    return `${stands}: an operator pinned it ${until}.`;
  }
  if (e.mode === "off") return `${stands}: its mode is off, it is neither measured nor changed.`;
  if (e.mode === "shadow") {
    return `${stands}: its mode is shadow, so nothing is written. In mode reclaim it would be `
      + `${showCores(e.monitor_cpu_limit)} now${e.peak ? `: ${e.peak.because}` : `${because(e)}.`}`;
  }
  const paused = e.paused ? " Writes are paused, so it stays there." : "";
  const held = e.bounds.cap < e.cpu_limit ? ` ${capReason(e)} allows no more.` : "";
  if (e.peak && e.bounds.floor < e.bounds.cap) {
    if (e.start_left_s > 0) return `${stands}: it is not measured before start_delay is over, in ${showLeft(e.start_left_s)}.${paused}`;
    const isWhole = e.current_cpu_limit >= e.bounds.cap;
    return `${stands}${isWhole ? ", all it may have" : ""}: ${e.peak.because}${isWhole ? held : ""}${paused}`;
  }
  if (e.current_cpu_limit < e.bounds.cap) {
    const floor = e.current_cpu_limit <= e.bounds.floor ? ` This is its floor (${floorReason(e)}).` : "";
    return `${stands}${because(e)}.${lastStep(e)}${floor}${paused}`;
  }
  if (e.bounds.floor >= e.bounds.cap) {
    const floor = `its floor is as high (${floorReason(e)})`;
    return `${stands}, all it may have, and never goes below: ${floor}.${held}${paused}`;
  }
  return `${stands}, all it may have${lastStep(e) || ": it was not lowered so far."}${held}${paused}`;
}

function because(e) {
  if (e.smoothed_cpu_usage === null || e.smoothed_cpu_usage === undefined) return "";
  return `, because it lately used about ${showCores(e.smoothed_cpu_usage)} (smoothed)`;
}

// About the newest change that was written, with a space before it.
function lastStep(e) {
  const step = e.decisions.findLast((decision) => decision.result === "applied");
  if (!step) return "";
  const lead = e.current_cpu_limit >= e.bounds.cap ? "." : "";
  const change = `${showCores(step.old_cores)} -> ${showCores(step.applied_cores)}`;
  return `${lead} The last change, ${change} at ${showTime(step.at)}: ${tellReason(step, e)}.`;
}

// For somebody who does not know about votes.
function tellReason(step, e) {
  const c = e.job_cpu_monitor;
  const votes = `(votes ${showVotes(step.votes_sum)}, more than ${e.window.threshold} are needed)`;
  if (step.kind === "shrink") return `use stayed below ${plain(c.relative_lower_bound)} of the limit ${votes}`;
  if (step.kind === "grow") return `use stayed above ${plain(c.relative_upper_bound)} of the limit ${votes}`;
  return describeReason(step);
}

function capReason(e) {
  const b = e.bounds;
  if (isSet(b.ancestor_cap) && b.ancestor_cap <= b.cap) return `The quota of ${b.ancestor || "/"} above it, ${showCores(b.ancestor_cap)} cores,`;
  if (isSet(b.quota_found) && b.quota_found <= b.cap) return `The quota its cgroup was found with, ${showCores(b.quota_found)} cores,`;
  return "What it ordered";
}

const isSet = (value) => value !== null && value !== undefined;

export function floorReason(e) {
  const c = e.job_cpu_monitor;
  const { cap } = e.bounds;
  const byLimit = c.min_cpu_limit;
  const byRatio = (c.min_limit_ratio ?? 0) * cap;
  const cores = Math.max(byLimit, byRatio);
  if (c.headroom_ratio && e.bounds.floor > Math.min(cores, cap)) return `headroom_ratio = ${plain(c.headroom_ratio)} above the use of the window`;
  return byRatio > byLimit ? `min_limit_ratio = ${plain(c.min_limit_ratio)} of the cap` : `min_cpu_limit = ${plain(byLimit)}`;
}

// Why a limit moved.
export function describeReason(decision) {
  if ((decision.kind === "grow" || decision.kind === "shrink") && !isSet(decision.votes_sum)) {
    return `its highest use of late ${decision.kind === "grow" ? "asks for more" : "fades"}, use ${measured(decision.usage_cores)}`;
  }
  if (decision.kind === "grow" || decision.kind === "shrink") {
    return `votes ${showVotes(decision.votes_sum)}, use ${measured(decision.usage_cores)}, smoothed ${measured(decision.smoothed_cores)}`;
  }
  if (decision.kind === "restore") {
    const signs = [];
    if (decision.throttled_ratio) signs.push(`${showRatio(decision.throttled_ratio)} of the periods throttled`);
    if (decision.pressure_ratio) signs.push(`some task waited for CPU ${showRatio(decision.pressure_ratio)} of the time`);
    if (!signs.length) signs.push(`use ${measured(decision.usage_cores)} above the limit`);
    return `${signs.join(", ")}${decision.by_look ? " at a look between two checks" : ""}, so all was given back at once`;
  }
  return KIND_REASONS[decision.kind] ?? decision.kind;
}

// What the next check does if its vote is like the others: the sum, the threshold, and the step.
export function describeNext(e) {
  const { bounds: b, window: w, job_cpu_monitor: c } = e;
  if (e.mode === "off") return "none in mode off";
  if (e.start_left_s > 0) return `measured after start_delay, in ${showLeft(e.start_left_s)}`;
  if (e.peak) return e.peak.next;
  const limit = e.monitor_cpu_limit;
  const total = w.votes.reduce((sum, vote) => sum + vote, 0);
  const size = w.votes.length;
  if (c.vote_mode === "ytsaurus" && size === w.size - 1) return describeLastVote(e, total);
  if (size < w.size) return `decides when the window has ${w.size} votes; now ${size}, sum ${showVotes(total)}`;
  const low = w.votes.filter((vote) => vote === -1).length;
  const high = w.votes.filter((vote) => vote === 1).length;
  const shown = showCores(limit);
  const below = `${low} of ${size} below ${plain(c.relative_lower_bound)} x ${shown} = ${showCores(b.lower_bound)} cores`;
  const above = `${high} of ${size} above ${plain(c.relative_upper_bound)} x ${shown} = ${showCores(b.upper_bound)} cores`;
  const needs = `needs |sum| > ${w.threshold}, has ${showVotes(total)}`;
  if (total > w.threshold) return `${needs}: ${above} -> ${describeGrow(e)}`;
  if (total < -w.threshold) return `${needs}: ${below} -> ${describeShrink(e)}`;
  const votes = [[below, low], [above, high]].filter(([, number]) => number).map(([text]) => text).join(" and ");
  return `${needs}: ${votes || "all between the bounds"} -> hold`;
}

// The form of ytsaurus keeps one vote less than it needs between two checks.
function describeLastVote(e, total) {
  const { threshold } = e.window;
  const needs = `needs |sum| > ${threshold}, has ${showVotes(total)} and one vote to come`;
  if (total - 1 < -threshold) return `${needs}: -> ${describeShrink(e)}, if that is ${total < -threshold ? "not +1" : "-1"}`;
  if (total + 1 > threshold) return `${needs}: -> ${describeGrow(e)}, if that is ${total > threshold ? "not -1" : "+1"}`;
  return `${needs} -> hold`;
}

function describeGrow(e) {
  const { job_cpu_monitor: c, monitor_cpu_limit: limit } = e;
  const { cap } = e.bounds;
  if (limit >= cap) return `would grow, but ${showCores(limit)} is its cap already`;
  if (c.direction === "down-only") return "would grow, but direction is down-only";
  return `grow to ${showCores(Math.min(limit * c.increase_coefficient, cap))} (x ${plain(c.increase_coefficient)})${describeHindrance(e)}`;
}

function describeShrink(e) {
  const { job_cpu_monitor: c, monitor_cpu_limit: limit } = e;
  const { floor } = e.bounds;
  if (limit <= floor) return `would shrink, but ${showCores(limit)} is its floor (${floorReason(e)})`;
  if (c.direction === "up-only" || e.mode === "up-only") return `would shrink, but its ${c.direction === "up-only" ? "direction" : "mode"} is up-only`;
  if (e.held_s > 0) return `would shrink, but restore_hold or startup_boost keep it for ${showLeft(e.held_s)} more`;
  return `shrink to ${showCores(Math.max(limit * c.decrease_coefficient, floor))} (x ${plain(c.decrease_coefficient)})${describeHindrance(e)}`;
}

// Why a step is not written even when it is decided.
function describeHindrance(e) {
  if (["refused", "contested", "overridden", "pinned"].includes(e.status)) return `, not written: it is ${e.status}`;
  if (e.mode === "shadow") return ", not written in mode shadow";
  return e.paused ? ", not written while writes are paused" : "";
}

// ---- the facts behind it

// [[heading, text], ...] of all that the limit follows from.
export function listFacts(e) {
  const b = e.bounds;
  const found = isSet(b.quota_found) ? showCores(b.quota_found) : "none";
  const above = isSet(b.ancestor_cap) ? `${showCores(b.ancestor_cap)}, of ${b.ancestor || "/"}` : "none";
  const facts = [
    ["Source", describeSource(e)],
    ["Cgroup", e.directory || e.cgroup],
    ["Ordered", `${showCores(e.cpu_limit)} cores${isSet(e.cpu_limit_given) ? "" : ", taken from its cgroup"}`],
    ["Limit now", `${showCores(e.current_cpu_limit)} cores`],
    ["Used in the last check", isSet(e.usage) ? `${measured(e.usage)} cores` : "–"],
    ["Smoothed use", isSet(e.smoothed_cpu_usage) ? `${measured(e.smoothed_cpu_usage)} cores` : "–"],
    ["Cap", `${showCores(b.cap)} cores: least of the order, the quota found (${found}), the least above (${above})`],
    ["Floor", `${showCores(b.floor)} cores: ${floorReason(e)}`],
    ["Mode", describeMode(e)],
    ["In force", `${describeQuota(e.in_force)}; found: ${describeQuota(e.found)}`],
    ["Throttled", `${showRatio(e.throttled_ratio)} of the periods of the last check`],
    ["Pressure", describePressure(e)],
    ...(e.peak ? [["Rule", describePeak(e.peak)], ["Held back", describeBudget(e.peak)]] : []),
    ["Last write", describeWrite(e)],
  ];
  if (e.job_cpu_monitor.actuator === "weight") facts.push(["Actuator", "weight: the limit is a share for when CPU is short, it never throttles"]);
  if (e.notes?.length) facts.push(["Held by", e.notes.join("; ")]);
  const a = e.aggregated;
  if (a) {
    facts.push(["So far", `core-seconds: ${fixed(a.max_cpu_s, 0)} ordered, ${fixed(a.smoothed_cpu_s, 0)} used (smoothed), `
      + `${fixed(a.preempted_cpu_s, 0)} reclaimed`
      + (e.fast_restores ? `; the full limit given back at once ${e.fast_restores} x` : "")
      + (a.throttled_cpu_s ? `; its threads were held back for ${fixed(a.throttled_cpu_s, 1)} s, ${fixed(a.late_cpu_s, 1)} s of it while `
        + "its limit was lowered" : "")]);
  }
  return facts;
}

function describePeak(p) {
  const peak = isSet(p.peak_cores) ? `${measured(p.peak_cores)} cores` : "none yet";
  return `peak: ${peak} remembered, half-life ${showSpan(p.half_life_s)}, caution ${fixed(p.caution)} of 0 to 7`;
}

// How often a lowered limit held the job back, against the budget for it.
export function describeBudget(p) {
  return `${p.held_count} ${p.held_count === 1 ? "time" : "times"}, ${showSpan(p.held_s)} of ${showSpan(p.watched_s)} watched = `
    + `${showRatio(p.held_ratio, 2)}, budget ${showRatio(p.throttle_budget, 2)}`;
}

function describeSource(e) {
  if (e.source.startsWith("ordered by the scheduler")) return e.source;
  return e.source ? `from source ${e.source}` : "added by `cpumond job add`";
}

function describeMode(e) {
  const words = [e.mode];
  if (isSet(e.xattr_mode)) words.push(`xattr user.cpumond.mode asks for ${e.xattr_mode}`);
  if (e.refused) words.push(`refused: ${e.refused}`);
  if (e.paused) words.push("all writes paused by the pause file");
  if (e.status !== e.mode && e.status !== "refused") words.push(e.status);
  if (e.contested_losses) words.push(`limit lowered by somebody else ${e.contested_losses} x`);
  return words.join(", ");
}

function describeQuota(q) {
  let text = isSet(q.quota_us) ? `${q.quota_us} us of each ${q.period_us} us = ${showCores(q.quota_us / q.period_us)} cores`
    : `no quota (period ${q.period_us} us)`;
  if (q.burst_us) text += `, burst ${q.burst_us} us`;
  return isSet(q.weight) ? `${text}, weight ${q.weight}` : text;
}

function describePressure(e) {
  const p = e.pressure;
  if (!p) return "not known (no PSI for this cgroup)";
  return `some task waited for CPU ${showRatio(p.some_10s_ratio, 1)} of the last 10 s, ${showRatio(p.some_60s_ratio, 1)} of the last 60 s`;
}

function describeWrite(e) {
  let text = e.last_result || "none so far";
  if (e.write_errors) text += `, ${e.write_errors} ${e.write_errors === 1 ? "error" : "errors"} so far`;
  return e.last_error ? `${text}; ${e.last_error}` : text;
}
