// The scheduler's history, for graphs; and answers that may arrive after their page is drawn.

import { get, query, Refusal, serverNow, session } from "./api.js";
import { withGaps } from "./chart.js";
import { chosenSpan, go, showAll, showSpan, work } from "./chart_work.js";
import { h } from "./dom.js";
import { time } from "./format.js";
import { currentQuery, hrefWith } from "./route.js";

export const RANGES = { "1h": ["1 h", 3600], "24h": ["24 h", 86400], "7d": ["7 d", 604800], "30d": ["30 d", 2592000], "365d": ["1 year", 31536000] };
export const DAY_S = 86400; // so long points are kept; farther back pools have means of days
export const DEFAULT_RANGE = "1h";
const HISTORY_PERIOD_MS = 5000;
const MAX_KEPT = 60;
const SHORT_WAIT_MS = 500;
const OFF_MS = 60000;

// The scheduler's sentence that it keeps no history, and until when it is not asked again.
const off = { problem: "", until: -Infinity };
const isOff = () => performance.now() < off.until;
let isAsked = false;
let lengthS = 0; // of the history, as far as it was asked for

// Asks before the first request and while history is off: a refused request would be an error in the browser's console.
export async function historyIsOff() {
  const { value } = isOff() || (isAsked && !off.problem) ? {} : await remember("me", 0, () => get("/me"));
  if (value) {
    isAsked = true;
    lengthS = value.history_length_s;
    if (lengthS > 0) off.problem = "";
    else Object.assign(off, { problem: "history is turned off: [history] length = 0", until: performance.now() + OFF_MS });
  }
  return isOff();
}

const kept = new Map(); // session and name -> {value, error, at, askedAt, asking}

// The newest answer of `ask`, which is asked again at most every `periodMs`: {value, error, at}. `value` stays what it
// was when a later answer is a refusal; `at` is when it came. Waits at most `patienceMs` for the first answer, and not long
// for a newer one.
export async function remember(name, periodMs, ask, patienceMs = 20000) {
  const key = `${session()} ${name}`; // whoever signs in anew is answered anew
  let entry = kept.get(key);
  if (!entry) {
    entry = { value: null, error: null, at: null, askedAt: -Infinity, asking: null };
    kept.set(key, entry);
    if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  }
  if (!entry.asking && performance.now() - entry.askedAt >= periodMs) {
    entry.askedAt = performance.now();
    entry.asking = ask().then((value) => Object.assign(entry, { value, error: null, at: serverNow() }), (error) => {
      if (!(error instanceof Refusal)) console.error(error);
      entry.error = error;
    }).finally(() => { entry.asking = null; });
  }
  if (entry.asking) {
    const waitMs = entry.value === null ? patienceMs : Math.min(patienceMs, SHORT_WAIT_MS);
    await Promise.race([entry.asking, new Promise((resolve) => { setTimeout(resolve, waitMs); })]);
  }
  return { value: entry.value, error: entry.error, at: entry.at };
}

export function chosenRange(search = currentQuery()) {
  const range = search.get("range");
  return range !== null && Object.hasOwn(RANGES, range) ? range : DEFAULT_RANGE;
}

// What the address says of the past, as a request asks for it: a span of its own, else the last part of it.
export function askedTime(range = chosenRange()) {
  const span = chosenSpan();
  return span ? { since: span.from, until: span.to } : { since_s: RANGES[range][1] };
}

// {times, columns, periodS, until, problem, isRefused}: the history of one object; `until` is the end of the axis,
// `problem` the sentence to show where there are no points.
export async function readHistory({ kind, name, tree = "" }, range = chosenRange(), patienceMs = 20000) {
  const nothing = (problem) => ({ times: [], columns: {}, periodS: null, until: null, isRefused: true, problem });
  if (await historyIsOff()) return nothing(off.problem);
  if (chosenSpan()?.from >= serverNow()) return nothing("This time is in the future.");
  const where = `/history${query({ kind, name, tree, ...askedTime(range), max_points: 600 })}`;
  const { value, error, at } = await remember(where, HISTORY_PERIOD_MS, async () => withGaps(await get(where)), patienceMs);
  // An object that the history does not know yet is a 404, too.
  const isRefused = error && error.status !== 0 && (error.status !== 404 || /turned off/.test(error.message));
  if (isRefused && error.status === 404) Object.assign(off, { problem: error.message, until: performance.now() + OFF_MS });
  return {
    times: value?.times ?? [], columns: value?.columns ?? {}, periodS: value?.period_s ?? null,
    until: Math.max(at ?? 0, value?.times.at(-1) ?? 0) || null, isRefused,
    problem: isRefused ? error.message : value?.times.length ? "" : chosenSpan() ? "Nothing is recorded for this time."
      : "No points yet: the first one comes within a minute.",
  };
}

// The history of an operation or job: the newest part, or where it has ended (`finish` is not null), from its start to its end.
export async function readLife(what, start, finish, patienceMs) {
  if (finish === null) return readHistory(what, undefined, patienceMs);
  const age = serverNow() - start;
  const [range] = Object.entries(RANGES).find(([, [, length]]) => length > age + 10) ?? ["24h"];
  const history = await readHistory(what, range, patienceMs);
  if (chosenSpan()) return history;
  const margin = Math.max(0.02 * (finish - start), 1);
  const isKept = history.times.some((at) => at >= start);
  return {
    ...history, times: isKept ? history.times : [], from: start - margin, until: Math.max(finish + margin, history.times.at(-1) ?? 0),
    problem: history.isRefused ? history.problem : isKept ? "" : "Nothing is recorded: it ended too long ago or was too short.",
  };
}

// A column of a history as `values` of a series.
export const column = (history, name) => (history.columns[name] ?? history.times.map(() => null));

// One line of a graph, of a column of the history; `more` as chart() has it: dash, step, fill, format.
export const line = (history, name, label, color, more = {}) => ({ label, values: column(history, name), color, ...more });

// What all graphs of a history have: its times, the ends of the axis, what to say when there is nothing, the events that
// are marked, and all that one can do with a graph.
export const axis = ({ times, from, until, problem }, marks = []) => ({ ...working(marks), times, from, until, empty: problem, ...ends() });

// The same but for the times: also of a graph whose points are no history.
export const working = (marks = []) => ({ work, marks, ...ends() });

function ends() {
  const span = chosenSpan();
  return span ? { from: span.from, until: span.to ?? serverNow(), newest: span.to === null ? undefined : "end" } : {};
}

// The history where it is of points; of days alone it has no shares.
export const ofPoints = (history) => (history.periodS < DAY_S ? history
  : { ...history, times: [], columns: {}, problem: "Shares are kept for the last 24 hours only: choose a part of these." });

// Which part of the past the graphs show; in the URL as `range`, or as `from` and `to`. `longestS`: the longest of the
// buttons for the last part of it, 0 for none.
export function rangeButtons(app, longestS = Infinity) {
  if (isOff()) return null;
  const [span, now] = [chosenSpan(), chosenRange()];
  const shown = Object.entries(RANGES).filter(([, [, length]]) => length <= Math.min(Math.max(lengthS, DAY_S), longestS));
  return h("div.ranges", { role: "group", "aria-label": "Time range of the graphs" },
    shown.map(([range, [text]]) => h("button.choice", {
      type: "button", key: range, "aria-pressed": String(!span && range === now),
      onclick: () => {
        const chosen = { range: range === DEFAULT_RANGE ? null : range };
        if (span) go({ ...chosen, from: null, to: null });
        else app.ask(chosen);
      },
    }, text)),
    ownRange(span, app),
    span ? h("button.choice", { type: "button", key: "out", onclick: showAll }, "Zoom out") : null,
    span ? h("span.muted.span", { key: "span" }, `${time(span.from)} – ${span.to === null ? "now" : time(span.to)}`) : null);
}

// A time as a field for it has it, by the browser's clock.
function localTime(at) {
  const date = new Date(1000 * at);
  return new Date(date - 60000 * date.getTimezoneOffset()).toISOString().slice(0, 19);
}

function ownRange(span, app) {
  const end = span ? span.to ?? serverNow() : serverNow();
  const begin = span ? span.from : end - RANGES[chosenRange()][1];
  const field = (name, text, at) => h("div.field", h("label", { for: `range-${name}` }, text),
    h("input", { id: `range-${name}`, name, type: "datetime-local", step: "1", required: true, "data-at": localTime(at) }));
  const fill = (event) => {
    const { open } = event.currentTarget;
    for (const input of event.currentTarget.querySelectorAll("input")) if (open) input.value = input.dataset.at;
  };
  return h("details.own-range", { key: "own", ontoggle: fill }, h("summary", "From – to"), h("form", { onsubmit: (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    const [from, to] = ["from", "to"].map((name) => new Date(form.elements[name].value).getTime() / 1000);
    app.local.rangeProblem = from < to ? null : "The end is not after the beginning: choose a later one.";
    if (app.local.rangeProblem) return app.redraw();
    form.closest("details").open = false;
    showSpan(from, to);
  } }, field("from", "From", begin), field("to", "To", end), h("button", { type: "submit" }, "Show"),
  app.local.rangeProblem ? h("p.error", { role: "alert" }, app.local.rangeProblem) : null));
}

// Links between the parts of a page, kept in the URL as `tab`: [[name, text], ...], the first one is the default.
export function tabs(label, choices, app, parameter = "tab") {
  const now = chosenTab(choices, parameter);
  return h("nav.tabs", { "aria-label": label }, choices.map(([name, text]) => h("a", {
    key: name, href: hrefWith({ [parameter]: name === choices[0][0] ? null : name }), "aria-current": name === now ? "page" : null,
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      app.ask({ [parameter]: name === choices[0][0] ? null : name, offset: null });
    },
  }, text)));
}

export function chosenTab(choices, parameter = "tab") {
  const name = currentQuery().get(parameter);
  return choices.some(([known]) => known === name) ? name : choices[0][0];
}
