// Which columns of a table are shown: the user's choice, kept in this browser, else those that fit the window.

import { h } from "./dom.js";

const kept = new Map(); // what decides -> the columns, the same array again while nothing changes

const sets = new Map(); // what decides -> all columns
const MAX_SETS = 20;
const SPARE_PX = 80; // of the window's width: margins and bars for scrolling

const isNarrow = () => matchMedia("(max-width: 700px)").matches;
// A choice holds for windows like the one in which it was made.
const place = (name) => `cpumond-columns-${name}${isNarrow() ? "-narrow" : ""}`;

function chosenKeys(name, all) {
  const known = localStorage.getItem(place(name))?.split(",").filter((key) => all.some((column) => column.key === key));
  return new Set(known?.length ? known : usual(all));
}

function usual(all) {
  let left = innerWidth - SPARE_PX - all[0].width;
  const fits = ({ shown, width }) => shown === "always" || (shown === "wide" && !isNarrow() && width <= left);
  return all.filter((column) => fits(column) && ((left -= column.width) || true)).map(({ key }) => key);
}

// Those of `all` that are shown. `shown` of a column: "always", "wide" (where there is room, the first ones first), or
// none: when it is chosen. The first one always is.
export function chosenColumns(name, all) {
  const keys = chosenKeys(name, all);
  const found = all.filter(({ key }, index) => !index || keys.has(key));
  const what = `${name} ${found.map(({ key }) => key)}`;
  const before = kept.get(what);
  if (before && before.every((column, index) => column === found[index])) return before;
  kept.set(what, found);
  return found;
}

// The columns that `make` makes, the same ones again for the same `what`: a table with other ones is drawn anew.
export function sameColumns(what, make) {
  if (!sets.has(what)) {
    if (sets.size > MAX_SETS) sets.clear();
    sets.set(what, make());
  }
  return sets.get(what);
}

export function columnMenu(name, all, app) {
  const keys = chosenKeys(name, all);
  const keep = (chosen) => {
    if (chosen) localStorage.setItem(place(name), all.filter(({ key }) => chosen.has(key)).map(({ key }) => key).join());
    else localStorage.removeItem(place(name));
    app.redraw();
  };
  return h("details.menu", { key: "columns", onkeydown: close, onfocusout: leave }, h("summary", "Columns"),
    h("fieldset", h("legend.hidden-text", "Visible columns"),
      all.slice(1).map((column) => h("label", { key: column.key }, h("input", {
        type: "checkbox", checked: keys.has(column.key),
        onchange: ({ target }) => {
          const chosen = chosenKeys(name, all).add(all[0].key);
          if (target.checked) chosen.add(column.key);
          else chosen.delete(column.key);
          keep(chosen);
        },
      }), column.title)),
      h("button", { key: "usual", type: "button", onclick: () => keep(null) }, "Reset")));
}

function close(event) {
  if (event.key !== "Escape" || !event.currentTarget.open) return;
  event.currentTarget.open = false;
  event.currentTarget.firstChild.focus();
  event.stopPropagation();
}

function leave({ currentTarget: menu, relatedTarget }) {
  if (relatedTarget && !menu.contains(relatedTarget)) menu.open = false;
}
