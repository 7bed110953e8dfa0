// A table of any length: only the rows in view are in the page. Sorts, filters, folds; the URL has the user's choices.

import { drop, h, island, morph, settle, skeleton } from "./dom.js";
import { count, number } from "./format.js";
import { currentQuery, setQuery, to } from "./route.js";
import { label } from "./tips.js";

const ROW_PX = 34;
const SPARE_ROWS = 12;
const STEP_ROWS = 6;
const SHORT_TEXT = 26;
const MOST_PRINTED = 2000; // rows
const PRINTING = ["beforeprint", "afterprint"];

const KIND = {
  create(node, props) {
    node.className = "table";
    node.closed = null;
    node.observer = new ResizeObserver(() => {
      setWidths(node);
      scrollRows(node);
    });
    build(node, props);
    node.observer.observe(node.scroller);
    node.printed = ({ type }) => { node.isPrinted = type === "beforeprint"; drawRows(node); };
    for (const type of PRINTING) window.addEventListener(type, node.printed);
  },
  update(node, props) {
    // The same answer and the same choices as before: nothing to draw.
    const { rows, columns } = node.drawn;
    const isSame = props.rows === rows && props.columns === columns && props.version === node.drawn.version && location.hash === node.drawnAt;
    if (isSame) {
      node.props = props;
      morph(node.tools, h("div.table-own-tools", props.tools));
    } else refresh(node, props);
  },
  destroy(node) {
    node.observer.disconnect();
    for (const type of PRINTING) window.removeEventListener(type, node.printed);
  },
};

// bigTable("pools", {
//   caption: "Pools of the tree default",         // for screen readers
//   columns: [{key, title, help, value: row => number|string|null, cell: row => Node|text, align: "right", isText, width}],
//                                                   // width in px, of all or none: a table whose columns never move
//   rows, rowKey: row => string,
//   parentKey: row => string|null,                  // given: a tree that can be folded; parents before their children
//   rowClass: row => text,
//   sort: "usage", descending: true,                // at first; null: the order of `rows`
//   searchable: row => text, noun: "pool", tools: Node, empty: text, height: "60vh",
//   version,                                        // another one: cells are drawn again though rows and columns are the same
//   onrows: rows => ...})                           // called with the rows that are in the page, when others are
// `narrow`: the width in a narrow window. `cell` defaults to the text of `value`. Names in the URL: PREFIXsort, PREFIXdesc, PREFIXfind, PREFIXclosed (prefix).
export const bigTable = (key, props) => island(KIND, key, props);

function state(props) {
  const query = currentQuery();
  const prefix = props.prefix ?? "";
  const sort = query.get(`${prefix}sort`);
  return {
    sort: sort ?? props.sort ?? null,
    descending: sort === null ? (props.descending ?? false) : query.get(`${prefix}desc`) === "1",
    find: query.get(`${prefix}find`) ?? "",
    closed: new Set((query.get(`${prefix}closed`) ?? "").split("\u001f").filter(Boolean)),
  };
}

function choose(node, changes) {
  const prefix = node.props.prefix ?? "";
  setQuery(Object.fromEntries(Object.entries(changes).map(([name, value]) => [prefix + name, value])));
  refresh(node, node.props);
  // A screen reader says the number of rows after a search, not each time that it changes.
  if ("find" in changes) node.voice.textContent = node.total.textContent;
}

function build(node, props) {
  const found = state(props);
  const searchId = `find-${node.key}`;
  node.search = h("input", {
    type: "search", id: searchId, placeholder: findText(props), value: found.find, autocomplete: "off",
    oninput: (event) => { node.scroller.scrollTop = 0; choose(node, { find: event.target.value || null }); },
  });
  node.total = h("span.muted");
  node.voice = h("span.hidden-text", { role: "status" });
  node.tools = h("div.table-own-tools");
  const bar = h("div.table-tools",
    props.searchable ? [h("label.hidden-text", { for: searchId }, findText(props)), node.search] : null,
    node.total, node.voice, node.tools);
  node.head = h("thead");
  node.body = h("tbody");
  node.widths = h("colgroup");
  node.scroller = h("div.table-scroll", {
    tabindex: "0", role: "region", "aria-label": props.caption, onscroll: () => schedule(node),
  }, h("table", h("caption.hidden-text", props.caption), node.widths, node.head, node.body));
  node.table = node.scroller.firstChild;
  node.append(bar, node.scroller);
  refresh(node, props);
}

function schedule(node) {
  if (node.pending) return;
  node.pending = requestAnimationFrame(() => {
    node.pending = 0;
    scrollRows(node);
  });
}

function refresh(node, props) {
  node.props = props;
  node.drawn = props; // node.props may be those of the next drawing already
  node.drawnAt = location.hash;
  const chosen = state(props);
  node.state = chosen;
  if (document.activeElement !== node.search && node.search.value !== chosen.find) node.search.value = chosen.find;
  node.shown = arrange(props, chosen);
  node.scroller.style.maxHeight = props.height ?? "70vh";
  morph(node.tools, h("div.table-own-tools", props.tools));
  const all = props.rows.length;
  const text = node.shown.length === all ? count(all, props.noun ?? "row")
    : `${count(node.shown.length, props.noun ?? "row")} of ${all.toLocaleString("en-GB")}`;
  if (node.total.textContent !== text) node.total.textContent = text;
  node.table.setAttribute("aria-rowcount", node.shown.length + 1);
  node.head = morph(node.head, makeHead(node));
  setWidths(node);
  drawRows(node);
}

function makeHead(node) {
  const { columns } = node.props;
  const { sort, descending } = node.state;
  return h("thead", h("tr", { "aria-rowindex": "1" }, columns.map((column) => {
    const order = sort !== column.key ? null : descending ? "descending" : "ascending";
    const first = startsDescending(column);
    const onclick = () => choose(node, order && descending !== first ? { sort: null, desc: null }
      : { sort: column.key, desc: (order ? !descending : first) ? "1" : "0" });
    return h("th", { scope: "col", key: column.key, class: column.align === "right" ? "right" : "", "aria-sort": order },
      label(column.value && !column.fixed ? sortButton(column.title, order, onclick) : column.title, column.help));
  })));
}

const findText = ({ noun = "row" }) => `Find ${/^[aeiou]/.test(noun) ? "an" : "a"} ${noun}`;
const startsDescending = (column) => column.descends ?? column.align === "right";

// The rows to show, in order, as [row, depth, hasChildren, isOpen].
function arrange(props, { sort, descending, find, closed }) {
  const column = props.columns.find(({ key }) => key === sort);
  const order = column ? makeOrder(column.value, descending) : null;
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (row) => words.every((word) => props.searchable(row).toLowerCase().includes(word));
  if (!props.parentKey) {
    const rows = words.length ? props.rows.filter(fits) : props.rows.slice();
    if (order) rows.sort(order);
    return rows.map((row) => [row, 0, false, false]);
  }
  let wanted = null;
  if (words.length) {
    wanted = new Set();
    const byKey = new Map(props.rows.map((row) => [props.rowKey(row), row]));
    for (const row of props.rows.filter(fits)) {
      for (let each = row; each && !wanted.has(props.rowKey(each)); each = byKey.get(props.parentKey(each))) {
        wanted.add(props.rowKey(each));
      }
    }
  }
  const children = Map.groupBy(wanted ? props.rows.filter((row) => wanted.has(props.rowKey(row))) : props.rows, props.parentKey);
  if (order) for (const list of children.values()) list.sort(order);
  const shown = [];
  const stack = (children.get(null) ?? []).slice().reverse().map((row) => [row, 0]);
  while (stack.length) {
    const [row, depth] = stack.pop();
    const key = props.rowKey(row);
    const below = children.get(key) ?? [];
    const isOpen = wanted !== null || !closed.has(key);
    shown.push([row, depth, below.length > 0, isOpen]);
    if (isOpen) for (let index = below.length - 1; index >= 0; index -= 1) stack.push([below[index], depth + 1]);
  }
  return shown;
}

function makeOrder(value, descending) {
  const sign = descending ? -1 : 1;
  return (a, b) => {
    const x = value(a);
    const y = value(b);
    if (x === null || x === undefined) return y === null || y === undefined ? 0 : 1;
    if (y === null || y === undefined) return -1;
    if (typeof x === "string" || typeof y === "string") return sign * String(x).localeCompare(String(y));
    return sign * (x - y);
  };
}

function setWidths(node) {
  const isNarrow = matchMedia("(max-width: 700px)").matches;
  const widths = node.props.columns.map((column) => (isNarrow && column.narrow) || column.width);
  const isFixed = widths.every(Boolean);
  node.table.classList.toggle("fixed", isFixed);
  if (!isFixed) return;
  node.widths = morph(node.widths, h("colgroup", widths.map((width) => h("col", { style: { width: `${width}px` } }))));
  node.table.style.minWidth = `${widths.reduce((sum, width) => sum + width)}px`;
}

// First and last of the rows that have to be in the page. They change in steps, not with each pixel.
function findRows(node) {
  const { scroller, shown } = node;
  if (node.isPrinted) return [0, Math.min(shown.length, MOST_PRINTED)];
  const height = scroller.clientHeight || 600;
  const step = (rows) => Math.floor(rows / STEP_ROWS) * STEP_ROWS;
  const top = Math.min(scroller.scrollTop, Math.max(shown.length * ROW_PX - height, 0));
  const first = Math.max(step(top / ROW_PX - SPARE_ROWS), 0);
  return [first, Math.min(first + step(height / ROW_PX + 2 * SPARE_ROWS) + 2 * STEP_ROWS, shown.length)];
}

function drawRows(node) {
  const { shown, props } = node;
  const [first, last] = findRows(node);
  const width = props.columns.length;
  const rows = [];
  if (first > 0) rows.push(spacer(first * ROW_PX, width, "above"));
  for (let index = first; index < last; index += 1) rows.push(makeRow(node, index));
  if (last < shown.length) rows.push(spacer((shown.length - last) * ROW_PX, width, "below"));
  if (!shown.length) rows.push(h("tr", { key: "empty" }, h("td.muted", { colspan: width }, props.rows.length ? "Nothing matches." : props.empty ?? "None.")));
  const hadFocus = node.body.contains(document.activeElement);
  node.body = morph(node.body, h("tbody", rows));
  // The element that had the focus is gone: without this the focus would go to the beginning of the page.
  if (hadFocus && !node.body.contains(document.activeElement)) node.scroller.focus({ preventScroll: true });
  show(node, first, last);
}

function show(node, first, last) {
  Object.assign(node, { first, last });
  node.props.onrows?.(node.shown.slice(first, last).map(([row]) => row));
}

// Draws the same rows after scrolling: those that stay in view are not touched.
function scrollRows(node) {
  const [first, last] = findRows(node);
  if (first === node.first && last === node.last) return;
  if (first >= node.last || last <= node.first || !node.shown.length) return drawRows(node);
  const { body, shown, props: { columns } } = node;
  const isSpacer = (row) => row?.classList.contains("spacer");
  if (isSpacer(body.firstChild)) body.firstChild.remove();
  if (isSpacer(body.lastChild)) body.lastChild.remove();
  const take = (row) => {
    if (row.contains(document.activeElement)) node.scroller.focus({ preventScroll: true });
    drop(row);
  };
  for (let index = node.first; index < first; index += 1) take(body.firstChild);
  for (let index = node.last; index > last; index -= 1) take(body.lastChild);
  for (let index = Math.min(node.first, last) - 1; index >= first; index -= 1) put(body, makeRow(node, index), body.firstChild);
  for (let index = Math.max(node.last, first); index < last; index += 1) put(body, makeRow(node, index), null);
  if (first > 0) body.prepend(spacer(first * ROW_PX, columns.length, "above"));
  if (last < shown.length) body.append(spacer((shown.length - last) * ROW_PX, columns.length, "below"));
  show(node, first, last);
}

function put(body, row, before) {
  body.insertBefore(row, before);
  settle(row);
}

const spacer = (height, width, key) => h("tr.spacer", { key: `\u001f${key}`, "aria-hidden": "true" }, h("td", { colspan: width, style: { height: `${height}px` } }));

function makeRow(node, index) {
  const { props } = node;
  const [row, depth, hasChildren, isOpen] = node.shown[index];
  const key = props.rowKey(row);
  return h("tr", { key, class: props.rowClass?.(row), "aria-rowindex": index + 2 }, props.columns.map((column, position) => {
    const content = column.cell ? column.cell(row) : String(column.value(row) ?? "–");
    const cellClass = column.align === "right" ? "right" : "";
    if (position > 0) return h("td", { class: cellClass }, content);
    return h("th", { scope: "row", class: cellClass, "aria-description": props.parentKey && depth ? `level ${depth + 1}` : null }, h("span.cell", props.parentKey
      ? [h("span.indent", { style: { "--depth": depth } }), hasChildren ? fold(node, key, isOpen) : h("span.no-fold")] : null, content));
  }));
}

function fold(node, key, isOpen) {
  const change = (open) => {
    const { closed } = node.state;
    if (open) closed.delete(key);
    else closed.add(key);
    choose(node, { closed: closed.size ? [...closed].join("\u001f") : null });
  };
  return h("button.fold", {
    type: "button", "aria-expanded": String(isOpen), "aria-label": `Pools below ${key}`, onclick: () => change(!isOpen),
    onkeydown: (event) => {
      if (event.key === "ArrowLeft" && isOpen) change(false);
      if (event.key === "ArrowRight" && !isOpen) change(true);
    },
  }, isOpen ? "▾" : "▸");
}

// A title that sorts; `order`: ascending or descending, null where the table is sorted by another one.
export const sortButton = (title, order, onclick) => h("button.sort", { type: "button", onclick }, title, h("span.arrow", { "aria-hidden": "true" }, { ascending: " ↑", descending: " ↓" }[order]));

// A short table, all rows in the page: {caption, columns as above, rows, rowKey, empty}. `sorted` of a column: the text of
// its aria-sort, where the page sorts.
// `stacked`: in a narrow window the cells of a row stand below each other.
export const table = ({ caption, columns, rows, rowKey, empty = "None.", stacked = false }) => h("div.table", { class: stacked ? "stacked" : null }, h("div.table-scroll", { tabindex: "0", role: "region", "aria-label": caption },
  h("table", h("caption.hidden-text", caption),
    h("thead", h("tr", columns.map((column) => h("th", { scope: "col", class: column.align === "right" ? "right" : "", "aria-sort": column.sorted }, label(column.title, column.help))))),
    h("tbody", rows.length ? rows.map((row, index) => h("tr", { key: rowKey ? rowKey(row, index) : index }, columns.map((column, position) =>
      h(position ? "td" : "th", { class: column.align === "right" ? "right" : "", scope: position ? null : "row",
        "data-label": stacked && position && typeof column.title === "string" ? column.title : null },
        column.cell ? column.cell(row) : String(column.value(row) ?? "–")))))
      : h("tr", h("td.muted", { colspan: columns.length }, empty))))));

// Name and value, one below the other: [[name, node], ...]
export const facts = (rows) => h("dl.facts", rows.filter(Boolean).map(([name, value]) => h("div", { key: name, class: isLong(value) ? "long-fact" : null }, h("dt", label(name)), h("dd", value ?? "–"))));

// More than has room in half of a narrow window.
const isLong = (value) => [value].flat().some((part) => (part instanceof Node ? part.textContent : String(part ?? "")).length > SHORT_TEXT);

// A number as text above a bar; `ratio` in [0, 1], more is cut; `mark` a second line in the bar.
export function bar(ratio, text, { mark = null, color = "--c1" } = {}) {
  const width = (value) => `${Math.max(0, Math.min(100, 100 * value)).toFixed(2)}%`;
  return h("span.bar", h("span.bar-fill", { "aria-hidden": "true", style: { width: width(ratio || 0), background: `var(${color})` } }),
    mark === null ? null : h("span.bar-mark", { "aria-hidden": "true", style: { left: width(mark) } }), h("span.bar-text", text));
}

// An operation by its title; the id stands in the address, and at the mouse.
export const operationLink = (id, title) => h("a.long", { href: to("operations", id), title: title ? `${title}, ${id}` : id }, title || `without title, ${id.slice(0, 8)}`);

// Buttons of which one is chosen: [[value, text, help], ...]; `choose` is called with the value of the one that is pressed.
export const choiceButtons = (label, choices, chosen, choose) => h("div.ranges", { key: label, role: "group", "aria-label": label }, choices.map(([value, text, title]) =>
  h("button.choice", { type: "button", key: value, title, "aria-pressed": String(value === chosen), onclick: () => choose(value) }, text)));

// A number above its name.
export const figure = (value, name, { tag = "div.card", title } = {}) => h(tag, { key: name, title }, h("div.figure-number", value), h("div.figure-name", name));

// A word on a coloured ground. tone: good, warn, bad, or none.
export const badge = (text, tone = "") => h("span.badge", { class: tone }, text);

// ---- lines that can be unfolded, one at a time; the open one is in the URL as `open`

export const chosenFold = () => currentQuery().get("open");

// rows: [{key, count, words, amounts: [text | null], body: () => nodes, or null while they are not loaded}]
export function folds(label, rows, app) {
  const open = chosenFold();
  return h("ul.folds", { "aria-label": label }, rows.map(({ key, count: all, words, amounts, body }) => {
    const isOpen = key === open;
    const totals = amounts.filter(Boolean).join(" · ");
    return h("li", { key },
      h("button.fold-line", { type: "button", "aria-expanded": String(isOpen), onclick: () => {
        setQuery({ open: isOpen ? null : key });
        app.redraw();
        if (!isOpen) app.reload();
      } }, h("span.arrow", { "aria-hidden": "true" }, isOpen ? "▾" : "▸"), h("span.count", number(all, 6)), " ",
        h("span.words", words), totals ? [" ", h("span.amounts", totals)] : null),
      isOpen ? h("div.fold-body", body() ?? skeleton()) : null);
  }));
}
