// Fields whose values are part of the URL: a change asks the scheduler anew, and shows the first part of the answer.

import { h } from "./dom.js";
import { currentQuery, setQuery } from "./route.js";

const TYPING_MS = 300;
const FIRST_PART = { offset: null, before: null, limit: null };

export function ask(app, changes) {
  setQuery({ ...FIRST_PART, ...changes });
  app.redraw();
  app.reload();
}

export function textFilter(name, label, placeholder, app, { type = "text", isWide = false } = {}) {
  const later = (event) => {
    const { value } = event.target;
    clearTimeout(app.local.typing);
    app.local.typing = setTimeout(() => ask(app, { [name]: value.trim() || null }), TYPING_MS);
  };
  return h("div.field", { key: name, class: isWide ? "wide" : "" }, h("label", { for: `filter-${name}` }, label),
    h("input", { id: `filter-${name}`, type, placeholder, autocomplete: "off", value: currentQuery().get(name) ?? "", oninput: later }));
}

// `choices`: [[value, text], ...]; the first choice is always all of them.
export function selectFilter(name, label, choices, app) {
  return h("div.field", { key: name }, h("label", { for: `filter-${name}` }, label),
    h("select", { id: `filter-${name}`, value: currentQuery().get(name) ?? "", onchange: (event) => ask(app, { [name]: event.target.value || null }) },
      h("option", { value: "" }, "all"), choices.map(([value, text]) => h("option", { value, key: value }, text))));
}
