// A graph as a file: its values, and a picture of it.

import { time } from "./format.js";

const EDGE = 16;
const ROW = 20;

// The series of which the lines are drawn.
export const shownSeries = ({ plot, props }) => props.series.filter((_, index) => plot?.series[index + 1].show);

function save(node, blob, ending) {
  const { min, max } = node.plot.scales.x;
  const stamp = (at) => new Date(1000 * at).toISOString().slice(0, 19).replaceAll(":", "-");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${node.props.title.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-+|-+$/g, "")}_${stamp(min)}_${stamp(max)}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// RFC 4180. A sign that would make a table's program compute the field is made harmless.
const field = (text) => {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

// What is shown: the lines that are drawn, and the times in view; marks are no values.
export function makeCsv(node) {
  const { times } = node.props;
  const { min, max } = node.plot.scales.x;
  const lines = shownSeries(node);
  const rows = times.flatMap((at, index) => (at < min || at > max ? [] : [[
    new Date(1000 * at).toISOString(), String(at), ...lines.map(({ values }) => String(values[index] ?? "")),
  ].join(",")]));
  return [["time", "seconds since 1970", ...lines.map(({ label }) => field(label))].join(","), ...rows, ""].join("\r\n");
}

export const saveCsv = (node) => save(node, new Blob([makeCsv(node)], { type: "text/csv" }), "csv");

// The graph with its title, times, marks and the names of its lines, in the colours that it has now.
export async function savePng(node) {
  const { plot, props } = node;
  const color = (name) => getComputedStyle(node).getPropertyValue(name).trim();
  const source = plot.ctx.canvas;
  const scale = source.width / plot.width;
  const lines = shownSeries(node);
  const picture = document.createElement("canvas");
  const ink = picture.getContext("2d");
  ink.font = "13px system-ui, sans-serif";
  const places = [];
  let [left, row] = [EDGE, 0];
  for (const line of lines) {
    const width = 26 + ink.measureText(line.label).width + EDGE;
    if (left > EDGE && left + width > plot.width + EDGE) [left, row] = [EDGE, row + 1];
    places.push([left, row]);
    left += width;
  }
  const [width, top] = [plot.width + 2 * EDGE, EDGE + 2 * ROW];
  const height = top + plot.height + (row + 1) * ROW + EDGE;
  [picture.width, picture.height] = [Math.round(width * scale), Math.round(height * scale)];
  ink.scale(scale, scale);
  ink.fillStyle = color("--card");
  ink.fillRect(0, 0, width, height);
  ink.fillStyle = color("--text");
  ink.font = "600 14px system-ui, sans-serif";
  ink.fillText(props.title, EDGE, EDGE + 12, plot.width);
  ink.font = "13px system-ui, sans-serif";
  ink.fillStyle = color("--muted");
  ink.fillText(`${time(plot.scales.x.min)} – ${time(plot.scales.x.max)}`, EDGE, EDGE + ROW + 12, plot.width);
  ink.drawImage(source, EDGE, top, plot.width, plot.height);
  ink.setLineDash([3, 3]);
  for (const { left: at, marks } of node.groups ?? []) {
    ink.strokeStyle = color(marks.some(({ tone }) => tone === "bad") ? "--bad" : "--warn");
    ink.beginPath();
    ink.moveTo(EDGE + plot.over.offsetLeft + at, top + plot.over.offsetTop);
    ink.lineTo(EDGE + plot.over.offsetLeft + at, top + plot.over.offsetTop + plot.over.clientHeight);
    ink.stroke();
  }
  lines.forEach((line, index) => {
    const [x, y] = [places[index][0], top + plot.height + places[index][1] * ROW + 14];
    ink.setLineDash(line.dash ? [4, 3] : []);
    ink.strokeStyle = color(line.color);
    ink.lineWidth = 3;
    ink.beginPath();
    ink.moveTo(x, y - 4);
    ink.lineTo(x + 18, y - 4);
    ink.stroke();
    ink.fillStyle = color("--text");
    ink.fillText(line.label, x + 26, y);
  });
  save(node, await new Promise((resolve) => { picture.toBlob(resolve, "image/png"); }), "png");
}
