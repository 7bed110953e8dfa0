// The CPU of a pool as one bar: used, allotted, demanded, waiting; reclaimed from it; two marks.

import { h } from "./dom.js";
import { cores, evenly, evenPercents, percent } from "./format.js";
import { choiceButtons } from "./table.js";

const UNIT = "cpumond-unit";
const MOST_WANTED = 2;

export const chosenUnit = () => (localStorage.getItem(UNIT) === "percent" ? "percent" : "cores");

export const unitSwitch = (app) => choiceButtons("Unit of amounts", [["cores", "Cores"], ["percent", "Percent"]], chosenUnit(), (unit) => {
  localStorage.setItem(UNIT, unit);
  app.redraw();
});

// The limits of jobs may add up to more than they ordered for a moment.
const reclaimed = (row) => Math.max(row.ordered_cores - row.limit_cores, 0);
const wanted = (row) => row.demand_cores + row.waiting_cores;

export const GLANCE_KEYS = [
  ["used", "used", "CPU usage of its jobs"], ["has", "allocated", "CPU allocated to its jobs beyond their usage"],
  ["wants", "demanded", "requests of jobs that have yet to start"],
  ["waits", "waiting", "demand of operations that are not running"], ["reclaimed", "reclaimed", "CPU that its jobs requested and do not need now"],
  ["guarantee", "guarantee", "its strong guarantee"], ["fair", "fair share", "the share that it is entitled to now"],
];

export const legend = () => h("ul.glance-legend", { "aria-label": "Parts of a bar" }, GLANCE_KEYS.map(([name, word, help]) =>
  h("li", { key: name, title: help }, h("span.key", { class: name, "aria-hidden": "true" }), word)),
  h("li", { key: "cut" }, h("span", { "aria-hidden": "true" }, "▸"), "demand beyond the bar"));

function describeRow(row, unit, totalCores) {
  const amount = unit === "percent" ? (value) => percent(totalCores ? value / totalCores : 0) : cores; // a percentage is of all that the tree has
  const of = unit === "percent" ? " of the tree's CPU" : " cores";
  const parts = [
    `used ${amount(row.used_cores)}`, `allocated ${amount(row.limit_cores)}`, `demanded ${amount(row.demand_cores)}`, `waiting ${amount(row.waiting_cores)}`,
    `reclaimed ${amount(reclaimed(row))}`, `guarantee ${amount(row.guarantee_cores)}`, `fair share ${amount(row.fair_share_cores)}`,
  ];
  return `${parts.join(", ")}${of}`;
}

// As long as the most of what the pool has, wants, is guaranteed or may have, so that small pools are seen as well as large
// ones; what is wanted beyond twice the rest is cut, else the rest would not be seen.
export function glanceCell(row, unit, totalCores) {
  const texts = unit === "percent" ? evenPercents([row.used_cores, row.limit_cores, wanted(row)].map((value) => value / (totalCores || 1))) : evenly([row.used_cores, row.limit_cores, wanted(row)]);
  const rest = Math.max(row.used_cores, row.limit_cores, row.ordered_cores, row.guarantee_cores, row.fair_share_cores);
  const isCut = rest > 0 && wanted(row) > MOST_WANTED * rest;
  const all = isCut ? MOST_WANTED * rest : Math.max(rest, wanted(row));
  const at = (value) => `${(all > 0 ? Math.min(100 * value / all, 100) : 0).toFixed(2)}%`;
  const part = (name, from, end, to = Math.min(end, all)) => (to - from > 0 ? h("span", { class: name, style: { left: at(from), width: at(to - from) } }) : null);
  const mark = (name, value) => (value > 0 ? h("span", { class: name, style: { left: at(value) } }) : null);
  const has = Math.max(row.limit_cores, row.used_cores);
  const demand = Math.max(row.demand_cores, has);
  return h("button.glance", { type: "button", "aria-label": `CPU of ${row.name}`, "aria-description": describeRow(row, unit, totalCores) },
    h("span.glance-text", texts.join(" / ").replaceAll(" % /", " /")),
    h("span.glance-bar", { "aria-hidden": "true" },
      part("used", 0, row.used_cores), part("has", row.used_cores, has), part("wants", has, demand), part("waits", demand, demand + row.waiting_cores),
      part("reclaimed", row.limit_cores, row.ordered_cores), mark("guarantee", row.guarantee_cores), mark("fair", row.fair_share_cores),
      isCut ? h("span.cut", "▸") : null));
}
