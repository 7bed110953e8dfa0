// Nodes as a map: a square each, the darker the more; one drawing, however many nodes.

import { h, island, morph, visible } from "./dom.js";
import { cores, percent } from "./format.js";
import { openReplay, replayControls, replayed } from "./replay.js";
import { currentQuery, setQuery, to } from "./route.js";
import { choiceButtons } from "./table.js";

const LEAST_PX = 12;
const MOST_PX = 44;
const WANTED_HEIGHT_PX = 300;
const TEXT_PX = 30; // from this size on a square has its number in it
const HEAD_PX = 20;
const HEAD_WIDTH_PX = 110;
const GAP_PX = 2;
const SPACE_PX = 12;
const FRAMED_PX = 20;
const STEPS = 5;

// name -> [word, cores of a node, what it means]
const MEASURES = {
  used: ["Used", (node) => node.used_cores ?? 0, "CPU usage of its jobs, relative to its capacity"],
  ordered: ["Requested", (node) => node.ordered_cores ?? 0, "CPU that its jobs request, relative to its capacity"],
  reclaimed: ["Reclaimed", (node) => Math.max((node.ordered_cores ?? 0) - (node.usage.cpu ?? 0), 0), "CPU that its jobs request and do not need now, relative to its capacity"],
};
const FAMILY = /^([a-z][a-z_]*)[-:=./_]?(.+)$/i;
const MOST_GROUPS = 60;

const measureOf = (query) => (Object.hasOwn(MEASURES, query.get("heat")) ? query.get("heat") : "used");
const coresOf = (node, measure) => (node.past === undefined ? MEASURES[measure][1](node) : (node.past ?? 0) * (node.capacity.cpu ?? 0));
const ratioOf = (node, measure) => (node.capacity.cpu ? coresOf(node, measure) / node.capacity.cpu : 0);

// What stands in a square besides its colour: of a node that is not as it should be.
function signOf(node) {
  if (node.past !== undefined) return node.past === null ? ["?", "not known"] : ["", ""];
  if (node.lost_at !== null) return ["✕", "lost"];
  if (!node.is_online) return ["✕", "silent"];
  if (node.overcommitted_s !== null) return ["!", "overcommitted"];
  if (node.failing) return ["!", "jobs fail on it"];
  return node.cordon ? ["/", "cordoned"] : ["", ""];
}

// name of the family -> node -> its tag: "rack" of nodes with tags rack-1, rack:2; those that divide the nodes.
function families(nodes) {
  const found = new Map();
  for (const node of nodes) {
    for (const tag of node.tags) {
      const parts = tag === node.address ? null : FAMILY.exec(tag);
      if (!parts) continue;
      if (!found.has(parts[1])) found.set(parts[1], new Map());
      found.get(parts[1]).set(node.id, tag);
    }
  }
  for (const [family, tags] of found) {
    const values = new Set(tags.values()).size;
    if (values < 2 || values > MOST_GROUPS) found.delete(family);
  }
  return found;
}

export function heatMap(nodes, app) {
  const query = currentQuery();
  const measure = measureOf(query);
  const known = families(nodes);
  const trees = new Set(nodes.map(({ tree }) => tree));
  const choices = [...(trees.size > 1 ? [["tree", "tree"]] : []), ...[...known.keys()].sort().map((family) => [`tag-${family}`, `tag ${family}`])];
  const by = choices.some(([name]) => name === query.get("by")) ? query.get("by") : "";
  const groupOf = by === "tree" ? (node) => node.tree ?? "no tree" : by ? (node) => known.get(by.slice(4)).get(node.id) ?? "others" : () => "";
  const choose = (changes) => {
    setQuery(changes);
    app.redraw();
  };
  return h("section.card", { key: "heat", "aria-labelledby": "heat-title" },
    h("div.heading", h("h2", { id: "heat-title" }, "Map"),
      choiceButtons("What the map shows", Object.entries(MEASURES).map(([name, [word, , help]]) => [name, word, help]), measure,
        (name) => {
          choose({ heat: name === "used" ? null : name });
          if (app.local.replay) openReplay(query.get("tree"), name, app);
        }),
      choices.length ? h("label.tree-selector", h("span", "by"), " ", h("select", { "aria-label": "Group the nodes by", value: by, onchange: (event) => choose({ by: event.target.value || null }) },
        h("option", { value: "" }, "name"), choices.map(([name, text]) => h("option", { key: name, value: name }, text)))) : null,
      scale()),
    replayControls(query.get("tree"), measure, app),
    island(KIND, "heat-map", { nodes: replayed(nodes, measure, app), measure, groupOf }));
}

const scale = () => h("span.heat-scale", h("span", "0 %"), Array.from({ length: STEPS + 1 }, (_, step) =>
  h("span.heat-step", { key: step, "aria-hidden": "true", style: { "--part": `${100 * step / STEPS}%` } })), h("span", "100 %"),
  h("span.muted", "! overcommitted or failing, / cordoned, ✕ silent or lost"));

const KIND = {
  create(node, props) {
    node.className = "heat";
    node.at = 0;
    node.canvas = h("canvas", { "aria-hidden": "true" });
    node.line = h("p.heat-line", { "aria-hidden": "true" });
    node.voice = h("span.hidden-text", { role: "status" }); // says a node once, not each of its changes
    node.board = h("div.heat-board", {
      role: "application", tabindex: "0", "aria-roledescription": "map of nodes", "aria-label": "Nodes: arrow keys go from one to the next, Enter opens it",
      onkeydown: (event) => move(node, event), onfocus: () => point(node, node.at), onblur: () => point(node, null),
      onpointermove: (event) => point(node, find(node, event)), onpointerleave: () => point(node, document.activeElement === node.board ? node.at : null),
      onclick: (event) => open(node, find(node, event)),
    }, node.canvas);
    node.append(node.board, node.line, node.voice);
    node.observer = new ResizeObserver(() => draw(node));
    node.observer.observe(node);
    node.themed = () => draw(node);
    window.addEventListener("themechange", node.themed);
    update(node, props);
  },
  update,
  destroy(node) {
    node.observer.disconnect();
    window.removeEventListener("themechange", node.themed);
  },
};

function update(node, props) {
  const chosen = node.cells?.[node.at]?.node.id;
  node.props = props;
  const collate = new Intl.Collator(undefined, { numeric: true }).compare;
  node.groups = [...Map.groupBy(props.nodes, props.groupOf)].sort(([a], [b]) => collate(a, b)).map(([name, nodes]) => [name, nodes.sort((a, b) => collate(a.id, b.id))]);
  node.cells = node.groups.flatMap(([group, nodes]) => nodes.map((each) => ({ node: each, group })));
  node.at = Math.max(node.cells.findIndex((cell) => cell.node.id === chosen), 0);
  draw(node);
  if (node.shown !== null && node.shown !== undefined) point(node, Math.min(node.shown, node.cells.length - 1));
}

// Places of the squares, as large as fits the height that is wanted; groups stand side by side, each below its name.
function place(node, width) {
  const hasHeads = node.groups.length > 1;
  const lay = (size) => {
    const most = Math.max(Math.floor(width / size), 1);
    let [index, x, y, below] = [0, 0, 0, 0];
    for (const group of node.groups) {
      const [, nodes] = group;
      const columns = hasHeads ? Math.min(most, Math.ceil(Math.sqrt(2 * nodes.length))) : most;
      const wide = Math.max(columns * size, HEAD_WIDTH_PX);
      const high = (hasHeads ? HEAD_PX : 0) + Math.ceil(nodes.length / columns) * size;
      group[2] = wide;
      if (x > 0 && x + wide > width) [x, y] = [0, below];
      nodes.forEach((_, number) => {
        const row = Math.floor(number / columns);
        Object.assign(node.cells[index], { x: x + (number % columns) * size, y: y + (hasHeads ? HEAD_PX : 0) + row * size });
        index += 1;
      });
      x += wide + SPACE_PX;
      below = Math.max(below, y + high);
    }
    return { size, height: below };
  };
  let found = lay(MOST_PX);
  while (found.height > WANTED_HEIGHT_PX && found.size > LEAST_PX) found = lay(found.size - 1);
  return found;
}

function draw(node) {
  const width = node.board.clientWidth;
  if (!width || !node.cells) return;
  const layout = node.layout = place(node, width);
  const ratio = devicePixelRatio || 1;
  const { canvas } = node;
  canvas.width = width * ratio;
  canvas.height = Math.max(layout.height, 1) * ratio;
  canvas.style.setProperty("width", `${width}px`);
  canvas.style.setProperty("height", `${layout.height}px`);
  const color = (name) => getComputedStyle(node).getPropertyValue(name).trim();
  const [text, empty, full, muted, most] = ["--text", "--bar", "--c1", "--muted", "--heat-most"].map(color);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const side = layout.size - GAP_PX;
  for (const cell of node.cells) {
    const value = Math.min(Math.max(ratioOf(cell.node, node.props.measure), 0), 1);
    pen.fillStyle = `color-mix(in srgb, ${full} calc(${value.toFixed(3)} * ${most}), ${empty})`;
    pen.fillRect(cell.x, cell.y, side, side);
    const [sign] = signOf(cell.node);
    if (sign && side > FRAMED_PX) {
      pen.strokeStyle = text;
      pen.strokeRect(cell.x + 1, cell.y + 1, side - 2, side - 2);
    }
    const label = sign || (layout.size >= TEXT_PX ? String(Math.round(100 * value)) : "");
    if (!label) continue;
    pen.font = `${sign ? Math.min(0.8 * side, 18) : 12}px system-ui, sans-serif`;
    pen.fillStyle = text;
    pen.fillText(label, cell.x + side / 2, cell.y + side / 2 + 1);
  }
  drawHeads(node, pen, muted);
  drawRing(node);
}

function drawHeads(node, pen, color) {
  if (node.groups.length < 2) return;
  pen.textAlign = "left";
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = color;
  let first = 0;
  for (const [name, nodes, wide] of node.groups) {
    const total = `: ${percent(sum(nodes, node.props.measure))}`;
    pen.fillText(shorten(pen, visible(name), wide - pen.measureText(total).width) + total, node.cells[first].x, node.cells[first].y - HEAD_PX / 2);
    first += nodes.length;
  }
}

// The whole name is shown at each of its nodes.
function shorten(pen, name, width) {
  let shown = name;
  for (let length = name.length; length > 1 && pen.measureText(shown).width > width; length -= 1) shown = `${name.slice(0, length - 1)}…`;
  return shown;
}

function sum(nodes, measure) {
  const all = nodes.reduce((total, each) => total + (each.capacity.cpu ?? 0), 0);
  return all ? nodes.reduce((total, each) => total + coresOf(each, measure), 0) / all : 0;
}

function drawRing(node) {
  const cell = node.cells[node.shown ?? -1];
  const ring = node.ring ??= node.board.appendChild(h("span.heat-ring", { "aria-hidden": "true" }));
  ring.hidden = !cell;
  if (!cell) return;
  const side = `${node.layout.size - GAP_PX}px`;
  for (const [name, value] of [["left", `${cell.x}px`], ["top", `${cell.y}px`], ["width", side], ["height", side]]) ring.style.setProperty(name, value);
}

function find(node, event) {
  const box = node.canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const { size } = node.layout;
  const index = node.cells.findIndex((cell) => x >= cell.x && x < cell.x + size && y >= cell.y && y < cell.y + size);
  return index < 0 ? null : index;
}

function point(node, index) {
  node.shown = index;
  const cell = index === null ? null : node.cells[index];
  drawRing(node);
  node.board.style.setProperty("cursor", cell ? "pointer" : "default");
  const text = cell ? describe(cell, node.props.measure) : "";
  node.line = morph(node.line, h("p.heat-line", { "aria-hidden": "true" }, text));
  if (node.said === cell?.node.id) return;
  node.said = cell?.node.id;
  node.voice = morph(node.voice, h("span.hidden-text", { role: "status" }, text));
}

function describe({ node, group }, measure) {
  const [word] = MEASURES[measure];
  const [, state] = signOf(node);
  return [node.id, `${word.toLowerCase()} ${cores(coresOf(node, measure))} of ${cores(node.capacity.cpu ?? 0)} cores, ${percent(ratioOf(node, measure))}`,
    node.past === undefined && `${node.job_count} jobs`, state, group].filter(Boolean).join(" · ");
}

function open(node, index) {
  const cell = index === null ? null : node.cells[index];
  if (cell) location.hash = to("nodes", cell.node.id);
}

function move(node, event) {
  const cell = node.cells[node.at];
  if (!cell) return;
  const last = node.cells.length - 1;
  // The nearest one on that side, straight rather than aslant.
  const beside = (sign) => {
    const distance = (each) => (sign * (each.y - cell.y) > 0 ? Math.abs(each.y - cell.y) + 3 * Math.abs(each.x - cell.x) : Infinity);
    return node.cells.reduce((best, each, index) => (distance(each) < distance(node.cells[best]) ? index : best), node.at);
  };
  const steps = {
    ArrowRight: () => Math.min(node.at + 1, last), ArrowLeft: () => Math.max(node.at - 1, 0), Home: () => 0, End: () => last,
    ArrowDown: () => beside(1), ArrowUp: () => beside(-1),
  };
  if (event.key === "Enter") open(node, node.at);
  else if (steps[event.key]) {
    node.at = steps[event.key]();
    point(node, node.at);
  } else return;
  event.preventDefault();
}
