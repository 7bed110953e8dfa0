// A graph over time, drawn by uPlot, with its newest values as text.

import { h, island, morph } from "./dom.js";
import { NONE, number } from "./format.js";

/* global uPlot */

const KIND = {
  create(node, props) {
    node.className = "chart";
    node.resizing = new ResizeObserver(() => resize(node));
    node.themed = () => draw(node, node.props, true);
    window.addEventListener("themechange", node.themed);
    draw(node, props, true);
    node.resizing.observe(node);
  },
  update(node, props) {
    draw(node, props, false);
  },
  destroy(node) {
    node.resizing.disconnect();
    window.removeEventListener("themechange", node.themed);
    node.plot?.destroy();
  },
};

// chart("usage", {title, times: [s since 1970], series: [{label, values, color: "--c1", step, dash, fill}],
//                 format, height, from, until, empty, min, max})
// `values` may hold null for a gap; a `hidden` series stands in the legend only. Colours are names of CSS variables.
export function chart(key, props) {
  return island(KIND, key, props, "figure");
}

function draw(node, props, anew) {
  const hasPoints = props.times.length > 0;
  const shape = JSON.stringify(props.series.map(({ label, color, step, dash, fill, hidden }) => [label, color, step, dash, fill, hidden]));
  const data = [props.times, ...props.series.map((series) => series.values)];
  if (node.head) morph(node.head, makeHead(props));
  else {
    node.head = makeHead(props);
    node.canvas = h("div.chart-canvas", { "aria-hidden": "true" });
    node.legend = makeLegend(props);
    node.append(node.head, node.canvas, node.legend);
  }
  node.canvas.hidden = !hasPoints;
  node.legend = morph(node.legend, makeLegend(props));
  if (!hasPoints) return;
  if (anew || node.shape !== shape || !node.plot) {
    node.plot?.destroy();
    node.shape = shape;
    node.plot = new uPlot(makeOptions(node, props), data, node.canvas);
    return;
  }
  node.plot.setData(data);
}

function makeHead(props) {
  return h("figcaption", h("span.chart-title", props.title),
    props.times.length ? null : h("span.muted", props.empty ?? "No points yet: the first comes within a moment."));
}

// The text of the graph: for everybody as a legend, and the only thing that a screen reader sees of it.
function makeLegend(props) {
  const format = props.format ?? number;
  return h("div.legend-wrap", { hidden: !props.times.length },
    h("table.legend", h("caption.hidden-text", `${props.title}: newest value, least and greatest of what is shown`),
      h("thead", h("tr", h("th", { scope: "col" }, h("span.hidden-text", "Line")), h("th", { scope: "col" }, "now"),
        h("th", { scope: "col" }, "min"), h("th", { scope: "col" }, "max"))),
      h("tbody", props.series.map((series) => {
        const known = series.values.filter((value) => value !== null && value !== undefined);
        const newest = known.length ? known[known.length - 1] : null;
        const show = series.format ?? format;
        return h("tr", h("th", { scope: "row" },
          h("span.swatch", { class: series.dash ? "dashed" : "", style: { "--swatch": `var(${series.color})` } }), series.label),
          h("td", known.length ? show(newest) : NONE),
          h("td", known.length ? show(reduce(known, Math.min)) : NONE),
          h("td", known.length ? show(reduce(known, Math.max)) : NONE));
      }))));
}

// Distance of the marks on the axis in s, how they look, and what is added below when the year or day is another one.
const TIMES = [
  [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
];

const reduce = (values, choose) => values.reduce((a, b) => choose(a, b));

function makeOptions(node, props) {
  const style = getComputedStyle(node);
  const color = (name) => style.getPropertyValue(name).trim();
  const format = props.format ?? number;
  const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 },
    font: "12px system-ui, sans-serif" };
  return {
    width: Math.max(node.clientWidth, 200),
    height: props.height ?? 200,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: {
      x: { time: true, range: (_, from, until) => [node.props.from ?? from, node.props.until ?? Math.max(until, from + 1)] },
      y: { range: (_, least, greatest) => {
        const low = Math.min(node.props.min ?? 0, least ?? 0);
        const high = Math.max(node.props.max ?? 0, greatest ?? 0);
        return [low, high > low ? low + (high - low) * 1.08 : low + 1];
      } },
    },
    axes: [{ ...axis, values: TIMES, space: 76 }, { ...axis, size: 58, values: (_, splits) => splits.map((value) => format(value)) }],
    series: [{}, ...props.series.map((series) => ({
      label: series.label,
      show: !series.hidden,
      stroke: color(series.color),
      width: series.width ?? 1.75,
      dash: series.dash ? [6, 4] : undefined,
      fill: series.fill ? `color-mix(in srgb, ${color(series.color)} 18%, transparent)` : undefined,
      paths: series.step ? uPlot.paths.stepped({ align: -1 }) : undefined,
      points: { show: series.points ?? false, size: series.size ?? 6, stroke: color(series.color), fill: color(series.color) },
      spanGaps: false,
    }))],
  };
}

function resize(node) {
  const width = Math.max(node.clientWidth, 200);
  if (node.plot && node.plot.width !== width) node.plot.setSize({ width, height: node.props.height ?? 200 });
}
