// The graphs of a page that is one file: an element with `data-chart` becomes the graph of that number.

import { chart, withGaps } from "./chart.js";
import { settle } from "./dom.js";
import { short } from "./format.js";

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const place of document.querySelectorAll("[data-chart]")) {
  const props = charts[place.dataset.chart];
  const given = props.series.map(({ level, values }) => values ?? props.times.map(() => level));
  const { times, columns } = withGaps({ ...props, columns: given });
  const series = props.series.map((each, index) => ({ ...each, values: columns[index] }));
  const node = chart(place.dataset.chart, { format: short, newest: "end", ...props, times, series });
  place.replaceWith(node);
  settle(node);
}
