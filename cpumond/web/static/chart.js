// A graph over time, drawn by uPlot, with its newest values, or those under the pointer, as text.

import { h, island, morph } from "./dom.js";
import { cores, elapsed, evenly, evenPercents, NONE, number, percent, formatCores, time } from "./format.js";

/* global uPlot */

const EVEN = new Map([[cores, evenly], [number, evenly], [formatCores, evenly], [percent, evenPercents]]);

const KIND = {
  create(node, props) {
    node.className = "chart";
    node.resizing = new ResizeObserver(() => resize(node));
    node.themed = () => draw(node, node.props, true);
    window.addEventListener("themechange", node.themed);
    window.addEventListener("lineschange", node.themed);
    draw(node, props, true);
    node.resizing.observe(node);
  },
  update(node, props) {
    // A selection that is being made stays as it is.
    if (node.isHeld) node.props = node.drawn;
    else draw(node, props, false);
  },
  destroy(node) {
    node.resizing.disconnect();
    window.removeEventListener("themechange", node.themed);
    window.removeEventListener("lineschange", node.themed);
    node.plot?.destroy();
  },
};

// chart("usage", {title, times: [s since 1970], series: [{label, values, color: "--c1", step, dash, fill, stack}],
//                 format, height, from, until, empty, min, max, cut, elapsed, sync, work, marks})
// `values` may hold null for a gap; a `hidden` series stands in the legend only. Colours are names of CSS variables.
// A step ends at its time; one that is "after" begins there. Series with `stack` stand one on the other, the first at 0.
// With `elapsed` times are seconds since a start. Nothing is drawn above `cut`. Graphs of one `sync` share the pointer.
// `work` is what chart_work.js adds for those who work with a graph; `marks` are events, as it has them.
export function chart(key, props) {
  return island(KIND, key, props, "figure");
}

function draw(node, props, anew) {
  node.drawn = props;
  const hasPoints = props.times.length > 0;
  const shape = JSON.stringify(props.series.map((series) => [series.label, series.color, series.step, series.dash, series.fill, isHidden(props, series)]));
  const below = props.times.map(() => 0);
  const data = [props.times, ...props.series.map(({ values, stack }) => (stack ? values.map((value, at) => (below[at] += value)) : values))];
  if (node.head) morph(node.head, makeHead(node));
  else {
    node.head = makeHead(node);
    node.canvas = h("div.chart-canvas", { "aria-hidden": "true" });
    node.legend = makeLegend(node);
    node.place = props.work ? props.work.makePlace(node) : node.canvas;
    node.append(node.head, node.place, node.legend);
    props.work?.addBelow(node);
  }
  node.place.hidden = !hasPoints;
  node.legend = morph(node.legend, makeLegend(node));
  if (!hasPoints) {
    props.work?.update(node);
    return;
  }
  if (anew || node.shape !== shape || !node.plot) {
    node.plot?.destroy();
    node.shape = shape;
    node.plot = new uPlot(makeOptions(node, props), data, node.canvas);
  } else node.plot.setData(data);
  props.work?.update(node);
}

// Whether a line stands in the legend only.
const isHidden = ({ work, title }, { hidden, label }) => hidden || (work?.isOff(title, label) ?? false);

function makeHead(node) {
  const { props } = node;
  return h("figcaption", h("span.chart-title", props.title),
    props.times.length ? props.work?.makeTools(node) : h("span.muted", props.empty ?? "No points yet: the first one comes in a moment."));
}

// The values of the graph as text: its legend, and all that a screen reader has of it.
function makeLegend({ props, at = null }) {
  const format = props.format ?? number;
  const rows = props.series.map((series) => {
    const known = series.values.filter((value, index) => value !== null && value !== undefined && isInView(props, index));
    const here = (at === null ? known.at(-1) : series.values[at]) ?? null;
    return [here, ...[Math.min, Math.max].map((choose) => (known.length ? reduce(known, choose) : null))];
  });
  const texts = (EVEN.get(format) ?? ((values) => values.map((value) => (value === null ? NONE : format(value)))))(rows.flat());
  const clock = (seconds) => (props.elapsed ? elapsed(seconds) : time(seconds));
  return h("div.legend-wrap", { hidden: !props.times.length },
    h("table.legend", h("caption.hidden-text", `${props.title}: newest, smallest and largest value shown`),
      h("thead", h("tr", h("th", { scope: "col" }, h("span.hidden-text", "Line")), h("th", { scope: "col" }, at === null ? props.newest ?? "now" : clock(props.times[at])),
        h("th", { scope: "col" }, "min"), h("th", { scope: "col" }, "max"))),
      h("tbody", props.series.map((series, row) => {
        const name = [h("span.swatch", { class: series.dash ? "dashed" : "", style: { "--swatch": `var(${series.color})` } }), series.label];
        return h("tr", { class: isHidden(props, series) ? "off" : "" }, h("th", { scope: "row" },
          props.work && !series.hidden ? props.work.makeSwitch(props.title, series.label, name) : name),
          rows[row].map((value, column) => h("td", { key: column }, value !== null && series.format ? series.format(value) : texts[3 * row + column])));
      }))));
}

const isInView = ({ times, from, until }, index) => times[index] >= (from ?? -Infinity) && times[index] <= (until ?? Infinity);

const GAP_S = 2;
const AXIS_PX = 58;
const LETTER_PX = 7;

// Distance of the marks on the axis in s, their format, and what is added below where the year or day changes.
const TIMES = [
  [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
];

const SPANS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((min) => 60 * min), ...[1, 2, 3, 6, 12].map((hours) => 3600 * hours),
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].map((days) => 86400 * days)];

const reduce = (values, choose) => values.reduce((a, b) => choose(a, b));

function makeOptions(node, props) {
  const style = getComputedStyle(node);
  const color = (name) => style.getPropertyValue(name).trim();
  const format = props.format ?? number;
  const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 },
    font: "12px system-ui, sans-serif" };
  const marks = props.elapsed
    ? { incrs: SPANS, values: (_plot, splits, _axis, _space, step) => splits.map((at) => elapsed(at, step)), space: 60, size: 32 }
    : { values: TIMES, space: 76 };
  const stacked = props.series.flatMap(({ stack }, index) => (stack ? [index + 1] : []));
  return {
    width: Math.max(node.clientWidth, 200),
    height: props.height ?? 200,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 6 }, ...(props.sync ? { sync: { key: props.sync } } : {}), ...props.work?.cursor(node) },
    hooks: { setCursor: [({ cursor }) => point(node, cursor.idx ?? null)], ...props.work?.hooks(node) },
    bands: stacked.slice(1).map((above, index) => ({ series: [above, stacked[index]] })),
    scales: {
      x: { time: !props.elapsed, range: (_, from, until) => [node.props.from ?? from, node.props.until ?? Math.max(until, from + 1)] },
      y: { range: (_, least, greatest) => {
        const low = Math.min(node.props.min ?? 0, least ?? 0);
        const high = Math.min(Math.max(node.props.max ?? 0, greatest ?? 0), node.props.cut ?? Infinity);
        return [low, high > low ? low + (high - low) * 1.08 : low + 1];
      } },
    },
    axes: [{ ...axis, ...marks }, { ...axis, size: (_, texts) => Math.max(AXIS_PX, 20 + LETTER_PX * Math.max(...(texts ?? []).map(({ length }) => length))), values: (_, splits) => splits.map((value) => format(value)) }],
    series: [{}, ...props.series.map((series) => ({
      label: series.label,
      show: !isHidden(props, series),
      stroke: color(series.color),
      width: series.width ?? 1.75,
      dash: series.dash ? [6, 4] : undefined,
      fill: series.fill ? `color-mix(in srgb, ${color(series.color)} ${series.stack ? 55 : 18}%, transparent)` : undefined,
      paths: series.step ? uPlot.paths.stepped(series.step === "after" ? { align: 1 } : { align: -1, alignGaps: -1 }) : undefined,
      points: { show: series.points ?? false, size: series.size ?? 6, stroke: color(series.color), fill: color(series.color) },
      spanGaps: false,
    }))],
  };
}

function point(node, at) {
  if (node.at === at) return;
  node.at = at;
  node.legend = morph(node.legend, makeLegend(node));
  node.props.work?.point(node);
}

function resize(node) {
  const width = Math.max(node.clientWidth, 200);
  if (node.plot && node.plot.width !== width) node.plot.setSize({ width, height: node.props.height ?? 200 });
}

// Adds a point without values to each gap, so that no line is drawn across it.
export function withGaps(history) {
  const { times, intervals, columns } = history;
  const gaps = times.map((_, index) => index > 0 && times[index] - intervals?.[index] > times[index - 1] + GAP_S);
  if (!gaps.includes(true)) return history;
  const widen = (values, fill) => values.flatMap((value, index) => (gaps[index] ? [fill(index), value] : [value]));
  return {
    ...history, times: widen(times, (index) => times[index] - intervals[index]),
    columns: Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, widen(values, () => null)])),
  };
}
