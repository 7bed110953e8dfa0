// What those who work with a graph have of it: drag or keys to zoom, lines that are switched, marks of events, files.

import { saveCsv, savePng, shownSeries } from "./chart_files.js";
import { h, morph } from "./dom.js";
import { NONE, number, time } from "./format.js";
import { currentQuery, setQuery } from "./route.js";

const LINES = "cpumond-lines";
const LEAST_S = 1;
const LAST_S = 8.64e12; // a Date has no later moment
const LEAST_PX = 5;
const MARK_PX = 18; // marks that are nearer to each other are one
const NEAR_PX = 7;
const MAX_SENTENCES = 4;
const MAX_ROWS = 100;
const KEYS = "Left and right arrow, Home and End move the cursor; with Shift they select, and Enter zooms into what is selected. + and - zoom, Escape zooms out.";

// ---- the part of time that is shown

const readMoment = (text) => {
  const at = /^\d+(\.\d+)?$/.test(text ?? "") ? Number(text) : /^\d{4}-\d\d/.test(text ?? "") ? Date.parse(text) / 1000 : NaN;
  return Math.abs(at) < LAST_S ? at : null;
};

// {from, to} of the address, in seconds since 1970 (`to` null: until now); null where it names none, or no such.
export function chosenSpan(search = currentQuery()) {
  const [from, to] = [readMoment(search.get("from")), readMoment(search.get("to"))];
  return from === null || (to !== null && to <= from) ? null : { from, to };
}

// Shows another part of time; the browser's "back" shows the one before.
export function showSpan(from, to) {
  const [begin, end] = to - from < LEAST_S ? [(from + to - LEAST_S) / 2, (from + to + LEAST_S) / 2] : [from, to];
  go({ from: String(Math.round(10 * begin) / 10), to: String(Math.round(10 * end) / 10) });
}

export function showAll() {
  if (chosenSpan()) go({ from: null, to: null });
}

export function go(changes) {
  setQuery(changes, true);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

// ---- lines

function readLines() {
  try {
    return JSON.parse(localStorage.getItem(LINES) ?? "{}");
  } catch {
    return {};
  }
}

// The same graph of another object has the same lines; what follows a comma is about the object.
const nameOf = (title) => title.split(",")[0];

function toggle(title, label) {
  const lines = readLines();
  const off = new Set(lines[nameOf(title)] ?? []);
  if (!off.delete(label)) off.add(label);
  localStorage.setItem(LINES, JSON.stringify({ ...lines, [nameOf(title)]: [...off] }));
  window.dispatchEvent(new Event("lineschange"));
}

// ---- what chart.js calls

export const work = {
  isOff: (title, label) => (readLines()[nameOf(title)] ?? []).includes(label),

  makeSwitch: (title, label, name) => h("button.line", {
    type: "button", "aria-pressed": String(!work.isOff(title, label)), title: `Show or hide ${label}`, onclick: () => toggle(title, label),
  }, name),

  makeTools(node) {
    const { title } = node.props;
    const tool = (text, what, act) => h("button.choice", { type: "button", "aria-label": `${text}: ${title}`, title: what, onclick: act }, text);
    return h("span.chart-tools",
      tool("CSV", "Save the visible lines as a CSV file", () => saveCsv(node)),
      tool("PNG", "Save the graph as a picture", () => savePng(node)));
  },

  makePlace(node) {
    node.marksPlace = h("div.marks", { role: "group", "aria-label": `Events in ${node.props.title}` });
    node.tip = h("div.chart-tip", { "aria-hidden": "true", hidden: true });
    node.voice = h("p.hidden-text", { role: "status" });
    return h("div.chart-plot", {
      tabindex: "0", role: "group", "aria-label": `${node.props.title}: graph. ${KEYS}`,
      "aria-keyshortcuts": "ArrowLeft ArrowRight Home End + - Enter Escape",
      onkeydown: (event) => press(node, event),
      onblur: () => {
        select(node, null); // a graph with a selection stands still
        if (!node.place.matches(":hover")) leave(node);
      },
    }, node.marksPlace, node.canvas, node.tip, node.voice);
  },

  addBelow(node) {
    node.values = h("details.values", { ontoggle: () => fillValues(node) }, h("summary", "Values"));
    node.append(node.values);
  },

  update(node) {
    node.place.setAttribute("aria-label", `${node.props.title}: graph. ${KEYS}`);
    node.values.hidden = !node.props.times.length;
    drawMarks(node);
    fillValues(node);
  },

  cursor: (node) => ({
    drag: { x: true, y: false, setScale: false },
    // A selection and a double click are of one graph; all go to the new part of time together.
    sync: { key: "page", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
    bind: {
      mousedown: (_, __, handle) => (event) => { node.isHeld = event.button === 0; return handle(event); },
      mouseup: (_, __, handle) => (event) => { node.isHeld = false; return handle(event); },
      dblclick: () => () => { showAll(); return null; },
    },
  }),

  hooks: (node) => ({
    setSelect: [(plot) => {
      const { left, width } = plot.select;
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      if (width >= LEAST_PX) showSpan(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    }],
    draw: [() => drawMarks(node)],
  }),

  point(node) {
    const left = node.plot?.cursor.left ?? -1;
    const near = node.place.matches(":hover, :focus") && left >= 0
      ? node.groups?.find((group) => Math.abs(group.left - left) <= NEAR_PX) : null;
    showTip(node, near ?? null);
  },
};

// ---- keys

function press(node, event) {
  if (event.target !== node.place || event.ctrlKey || event.metaKey || event.altKey) return;
  const { plot, props: { times } } = node;
  const { min, max } = plot.scales.x;
  const inside = times.map((_, index) => index).filter((index) => times[index] >= min && times[index] <= max);
  const first = inside[0];
  const last = inside.at(-1);
  const here = node.at === null || node.at === undefined || node.at < first || node.at > last ? null : node.at;
  const middle = here === null ? (min + max) / 2 : times[here];
  const acts = {
    ArrowLeft: () => step(node, here === null ? last : Math.max(here - 1, first), event.shiftKey),
    ArrowRight: () => step(node, here === null ? first : Math.min(here + 1, last), event.shiftKey),
    Home: () => step(node, first, event.shiftKey),
    End: () => step(node, last, event.shiftKey),
    Enter: () => zoomSelected(node),
    "+": () => showSpan(middle - (max - min) / 4, middle + (max - min) / 4),
    "=": () => acts["+"](),
    "-": () => showSpan(middle - (max - min), middle + (max - min)),
    Escape: () => { if (node.anchor !== null && node.anchor !== undefined) select(node, null); else showAll(); },
  };
  if (!acts[event.key] || (!inside.length && !["-", "Escape"].includes(event.key))) return;
  event.preventDefault();
  acts[event.key]();
}

function step(node, index, isSelecting) {
  const { plot, props } = node;
  if (!isSelecting) select(node, null);
  else node.anchor ??= props.times[node.at ?? index];
  const left = plot.valToPos(props.times[index], "x");
  plot.setCursor({ left, top: plot.over.clientHeight / 2 });
  if (isSelecting) select(node, props.times[index]);
  const show = (series) => (series.format ?? props.format ?? number)(series.values[index]);
  const near = node.groups?.find((group) => Math.abs(group.left - left) <= NEAR_PX);
  node.voice.textContent = [`${time(props.times[index])}: `, shownSeries(node)
    .map((series) => `${series.label} ${series.values[index] === null ? "not known" : show(series)}`).join(", "), near ? `. ${sentences(near)}` : ""].join("");
}

function select(node, until) {
  const { plot } = node;
  if (!plot) return;
  node.isHeld = until !== null;
  node.selected = until === null ? null : [Math.min(node.anchor, until), Math.max(node.anchor, until)];
  if (until === null) node.anchor = null;
  const [left, right] = (node.selected ?? [0, 0]).map((at) => plot.valToPos(at, "x"));
  plot.setSelect(node.selected ? { left, width: right - left, top: 0, height: plot.over.clientHeight } : { left: 0, width: 0, top: 0, height: 0 }, false);
}

function zoomSelected(node) {
  const { selected } = node;
  select(node, null);
  if (selected && selected[1] > selected[0]) showSpan(...selected);
}

function leave(node) {
  node.plot?.setCursor({ left: -10, top: -10 });
  showTip(node, null);
}

// ---- marks: [{at, text, href, tone, onclick}]

function sentences({ marks }) {
  const texts = marks.slice(0, MAX_SENTENCES).map(({ at, text }) => `${time(at)}: ${text}`);
  return texts.join(". ") + (marks.length > texts.length ? `. And ${marks.length - texts.length} more` : "");
}

// Marks that are in view, those near to each other as one: [{left, marks}].
function groupMarks({ plot, props }) {
  const { min, max } = plot.scales.x;
  const groups = [];
  for (const mark of [...(props.marks ?? [])].filter(({ at }) => at >= min && at <= max).sort((a, b) => a.at - b.at)) {
    const left = plot.valToPos(mark.at, "x");
    const last = groups.at(-1);
    if (last && left - last.left < MARK_PX) last.marks.push(mark);
    else groups.push({ left, marks: [mark] });
  }
  return groups;
}

function drawMarks(node) {
  const { plot } = node;
  if (!plot || !node.props.times.length || plot.scales.x.min === undefined || plot.scales.x.min === null) return;
  node.groups = groupMarks(node);
  const before = plot.over.offsetLeft;
  const heads = node.groups.map((group, index) => {
    const newest = group.marks.at(-1);
    return h("a.mark", {
      key: `${group.marks[0].at} ${group.marks[0].text}`, href: newest.href, "aria-label": sentences(group),
      class: ["bad", "warn", "good"].find((tone) => group.marks.some((mark) => mark.tone === tone)) ?? "",
      style: { left: `${(before + group.left).toFixed(1)}px`, "--drop": `${plot.over.offsetTop + plot.over.clientHeight}px` },
      // One stop for the Tab key; the arrow keys go from mark to mark.
      tabindex: index ? "-1" : "0",
      onclick: newest.onclick, onmouseenter: () => showTip(node, group), onmouseleave: () => showTip(node, null), onfocus: () => showTip(node, group), onblur: () => showTip(node, null),
      onkeydown: (event) => {
        const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
        if (!next) return;
        event.preventDefault();
        event.currentTarget[next]?.focus();
      },
    }, h("span", { "aria-hidden": "true" }, group.marks.length > 1 ? String(Math.min(group.marks.length, 99)) : ""));
  });
  morph(node.marksPlace, h("div.marks", { role: "group", "aria-label": `Events in ${node.props.title}`, hidden: !heads.length }, heads));
}

function showTip(node, group) {
  if (!node.tip) return;
  node.tip.hidden = !group;
  if (!group) return;
  const shown = group.marks.slice(0, MAX_SENTENCES);
  morph(node.tip, h("div.chart-tip", { "aria-hidden": "true" }, shown.map(({ at, text }) => h("p", h("strong", time(at)), ` ${text}`)),
    group.marks.length > shown.length ? h("p.muted", `and ${group.marks.length - shown.length} more`) : null));
  const before = node.plot.over.offsetLeft;
  const room = node.place.clientWidth - node.tip.offsetWidth;
  node.tip.style.left = `${Math.max(Math.min(before + group.left + 8, room), 0)}px`;
}

// ---- values as a table

function fillValues(node) {
  if (!node.values.open || !node.plot) return;
  const { props } = node;
  const { min, max } = node.plot.scales.x;
  const lines = shownSeries(node);
  const inside = props.times.map((_, index) => index).filter((index) => props.times[index] >= min && props.times[index] <= max);
  const each = Math.ceil(inside.length / MAX_ROWS);
  const rows = inside.filter((_, place) => place % each === 0);
  const format = props.format ?? number;
  const text = (series, value) => (value === null || value === undefined ? NONE : (series.format ?? format)(value));
  morph(node.values, h("details.values", { ontoggle: () => fillValues(node) }, h("summary", "Values"),
    each > 1 ? h("p.muted.flat", `One of every ${number(each, 6)} points of ${number(inside.length, 6)}; the CSV file has all.`) : null,
    h("div.table", h("div.table-scroll", { tabindex: "0", role: "region", "aria-label": `Values: ${props.title}` }, h("table",
      h("caption.hidden-text", `${props.title}: values at each time`),
      h("thead", h("tr", h("th", { scope: "col" }, "Time"), lines.map((series) => h("th.right", { scope: "col" }, series.label)))),
      h("tbody", rows.map((index) => h("tr", h("th", { scope: "row" }, time(props.times[index])),
        lines.map((series) => h("td.right", text(series, series.values[index])))))))))));
}
