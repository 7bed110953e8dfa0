// Fields whose values are part of the URL: a change asks the scheduler anew, and shows the first part of the answer.

import { h, island } from "./dom.js";
import { completion } from "./names.js";
import { currentQuery } from "./route.js";

const TYPING_MS = 300;
const FIRST_PART = { offset: null, before: null, limit: null };

// Stays while its field is drawn again and again.
const NAMES = {
  create(node, { name }) {
    node.hidden = true;
    queueMicrotask(() => node.append(completion(node.parentElement.querySelector("input"), name, () => currentQuery().get("tree") ?? "")));
  },
};

export const ask = (app, changes) => app.ask({ ...FIRST_PART, ...changes });

export function textFilter(name, label, placeholder, app, { type = "text", isWide = false } = {}) {
  const { local } = app; // of this page
  const timer = `typing ${name}`;
  // At the latest when the field is left, but not with its page.
  const take = ({ target }) => {
    clearTimeout(local[timer]);
    const value = target.value.trim();
    if (local === app.local && value !== (currentQuery().get(name) ?? "")) ask(app, { [name]: value || null });
  };
  const later = ({ target }) => {
    clearTimeout(local[timer]);
    local[timer] = setTimeout(take, TYPING_MS, { target });
  };
  const completed = name === "pool" || name === "node" ? island(NAMES, `${name}-names`, { name }, "span") : null;
  return h("div.field", { key: name, class: isWide ? "wide" : "" }, h("label", { for: `filter-${name}` }, label), completed,
    h("input", { id: `filter-${name}`, type, placeholder, autocomplete: "off", value: currentQuery().get(name) ?? "", oninput: later, onchange: take, list: completed ? `filter-${name}-names` : null }));
}

// `choices`: [[value, text], ...]; the first choice is always all of them.
export const selectFilter = (name, label, choices, app) => h("div.field", { key: name }, h("label", { for: `filter-${name}` }, label),
  h("select", { id: `filter-${name}`, value: currentQuery().get(name) ?? "", onchange: (event) => ask(app, { [name]: event.target.value || null }) },
    h("option", { value: "" }, "all"), choices.map(([value, text]) => h("option", { value, key: value }, text))));
