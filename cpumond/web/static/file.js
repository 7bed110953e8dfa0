// The graphs of a page that is one file: an element with `data-chart` becomes the graph of that number.

import { chart } from "./chart.js";
import { settle } from "./dom.js";
import { short } from "./format.js";

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const place of document.querySelectorAll("[data-chart]")) {
  const props = charts[place.dataset.chart];
  const series = props.series.map((each) => ({ ...each, values: each.values ?? props.times.map(() => each.level) }));
  const node = chart(place.dataset.chart, { format: short, newest: "end", ...props, series });
  place.replaceWith(node);
  settle(node);
}
