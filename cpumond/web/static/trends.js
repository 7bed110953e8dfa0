// Small graphs of the last hour, of the pools that are in the page: asked for together, kept for a minute.

import { get, path, query } from "./api.js";
import { h } from "./dom.js";
import { cores, duration } from "./format.js";
import { historyIsOff } from "./history.js";

const KEPT_MS = 60000;
const PAUSE_MS = 150; // rows that scroll by are not asked for
const MOST = 100;
const MOST_LETTERS = 4000;
const [WIDTH, HEIGHT] = [100, 20];

const known = new Map(); // "tree\u001fpool" -> {values, at}
let version = 0;
let timer = 0;

// Another number after each answer: what was drawn before it is old.
export const trendVersion = () => version;

const keyOf = (tree, name) => `${tree}\u001f${name}`;

// Asks for what is not known, or old, of the rows in the page; draws again when it is there.
export function wantTrends(tree, rows, app) {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const old = performance.now() - KEPT_MS;
    let letters = 0;
    const names = rows.map(({ name }) => name).filter((name) => !(known.get(keyOf(tree, name))?.at > old)).slice(0, MOST)
      .filter((name) => (letters += name.length + 1) < MOST_LETTERS);
    if (!names.length || await historyIsOff()) return;
    const at = performance.now();
    for (const name of names) known.set(keyOf(tree, name), { ...known.get(keyOf(tree, name)), at }); // asked for once
    const answer = await get(`${path`/trees/${tree}`}/trends${query({ pools: names.join("\n") })}`).catch(() => null);
    if (!answer) return;
    for (const name of names) {
      const values = Object.hasOwn(answer.pools, name) ? answer.pools[name] : []; // a pool may be called "constructor"
      known.set(keyOf(tree, name), { values, spanS: answer.step_s * values.length, at });
    }
    version += 1;
    app.redraw();
  }, PAUSE_MS);
}

export function trendCell(row) {
  const { values, spanS } = known.get(keyOf(row.tree, row.name)) ?? {};
  const there = values?.filter((value) => value !== null) ?? [];
  if (there.length < 2) return h("span.muted", "–");
  const most = Math.max(...there, 1e-9);
  const points = values.flatMap((value, index) => (value === null ? [] : [`${(index * WIDTH / (values.length - 1)).toFixed(1)},${(HEIGHT - 1 - (HEIGHT - 2) * value / most).toFixed(1)}`]));
  return h("span", { title: describeTrend(there, spanS) }, h("svg", { class: "trend", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    h("svg:polyline", { points: points.join(" ") })), h("span.hidden-text", describeTrend(there, spanS)));
}

function describeTrend(values, spanS) {
  const [first, last] = [values[0], values.at(-1)];
  const way = last > 1.05 * first ? "rose" : last < 0.95 * first ? "fell" : "stayed";
  return `${way === "stayed" ? `stayed at ${cores(last)}` : `${way} from ${cores(first)} to ${cores(last)}`} cores in ${duration(spanS)}, at most ${cores(Math.max(...values))}`;
}
