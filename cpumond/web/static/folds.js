// A list of lines that can be unfolded, one at a time; the open one is in the URL as `open`.

import { h, skeleton } from "./dom.js";
import { number } from "./format.js";
import { currentQuery, setQuery } from "./route.js";

export const chosenFold = () => currentQuery().get("open");

// rows: [{key, count, words, amounts: [text | null], body: () => nodes, or null while they are not loaded}]
export function folds(label, rows, app) {
  const open = chosenFold();
  return h("ul.folds", { "aria-label": label }, rows.map(({ key, count, words, amounts, body }) => {
    const isOpen = key === open;
    const totals = amounts.filter(Boolean).join(" · ");
    return h("li", { key },
      h("button.fold-line", { type: "button", "aria-expanded": String(isOpen), onclick: () => {
        setQuery({ open: isOpen ? null : key });
        app.redraw();
        if (!isOpen) app.reload();
      } }, h("span.arrow", { "aria-hidden": "true" }, isOpen ? "▾" : "▸"), h("span.count", number(count, 6)), " ",
        h("span.words", words), totals ? [" ", h("span.amounts", totals)] : null),
      isOpen ? h("div.fold-body", body() ?? skeleton()) : null);
  }));
}
