// Finds pages, pools, operations and nodes by a part of their names, and goes there.

import { get, query } from "./api.js";
import { h, morph, openDialog } from "./dom.js";
import { findNames } from "./names.js";
import { loadTrees } from "./rights.js";
import { to } from "./route.js";

const TYPING_MS = 120;
const OF_EACH = 6; // of a kind, and of each tree's pools
const TREES = 3;
const SHOWN = 20;

// `pages`: [[name, hash], ...]
export function openPalette(pages) {
  let found = [];
  let chosen = 0;
  let timer = 0;
  let asked = null;
  let problem = "";
  const pagesThatFit = (text) => pages.filter(([name]) => name.toLowerCase().includes(text)).map(([name, href]) => ({ kind: "page", name, href }));
  const status = h("p.hidden-text", { role: "status" });
  let list = h("ul.found", { id: "palette-list", role: "listbox", "aria-label": "Results" });
  const input = h("input", {
    id: "palette", type: "text", role: "combobox", autocomplete: "off", spellcheck: "false", "aria-label": "Page, pool, operation or node", "aria-expanded": "true",
    "aria-controls": "palette-list", "aria-autocomplete": "list", placeholder: "A page, pool, operation or node", oninput: ask, onkeydown: move,
  });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); go(found[chosen]); } }, input, list, status);
  const dialog = openDialog("Go to", form, [], () => { clearTimeout(timer); asked?.abort(); });
  dialog.classList.add("palette");
  show(pagesThatFit(""));

  function ask() {
    clearTimeout(timer);
    asked?.abort();
    const text = input.value.trim();
    show(pagesThatFit(text.toLowerCase()));
    if (text) timer = setTimeout(() => search(text), TYPING_MS);
  }

  async function search(text) {
    asked = new AbortController();
    const { signal } = asked;
    problem = "";
    const parts = await Promise.all([pools(text, signal), operations(text, signal), nodes(text, signal)].map((part) =>
      part.catch((error) => { problem = error.message; return []; })));
    if (signal.aborted) return;
    show([...pagesThatFit(text.toLowerCase()), ...parts.flat()]);
    status.textContent = found.length ? `${found.length} found` : problem || "Nothing found";
  }

  // What was chosen stays chosen when more is found.
  function show(next) {
    const before = found[chosen]?.href;
    found = next.slice(0, SHOWN);
    chosen = Math.max(found.findIndex(({ href }) => href === before), 0);
    draw();
  }

  function draw() {
    list = morph(list, h("ul.found", { id: "palette-list", role: "listbox", "aria-label": "Results" }, found.map((each, index) =>
      h("li", { id: `palette-${index}`, role: "option", "aria-selected": String(index === chosen), onclick: () => go(each) },
        h("span.found-name", each.name), h("span.muted", each.kind)))));
    if (!found.length) list.append(h("li.muted", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, problem || "Nothing found."));
    if (found.length) input.setAttribute("aria-activedescendant", `palette-${chosen}`);
    else input.removeAttribute("aria-activedescendant");
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  }

  function move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !found.length) return;
    event.preventDefault();
    chosen = (chosen + step + found.length) % found.length;
    draw();
  }

  function go(target) {
    if (!target) return;
    dialog.close();
    location.hash = target.href;
  }
}

async function pools(text, signal) {
  const { trees } = await loadTrees({ signal });
  return (await Promise.all(trees.slice(0, TREES).map(async ({ name }) =>
    (await findNames("pool", text, { tree: name, signal, limit: OF_EACH })).map(({ id }) => ({ kind: trees.length > 1 ? `pool of ${name}` : "pool", name: id, href: to("pools", name, id) }))))).flat();
}

async function operations(text, signal) {
  const { operations: list } = await get(`/operations${query({ search: text, limit: OF_EACH })}`, { signal });
  return list.map((each) => ({ kind: `operation, ${each.state}, of ${each.user}`, name: each.title || each.id, href: to("operations", each.id) }));
}

const nodes = async (text, signal) => (await findNames("node", text, { signal, limit: OF_EACH })).map(({ id }) => ({ kind: "node", name: id, href: to("nodes", id) }));
