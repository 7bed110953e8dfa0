// Forms in dialogs. Nothing is checked here: the scheduler checks, and its sentence is shown beside the field that it is
// about.

import { Refusal } from "./api.js";
import { h, openDialog } from "./dom.js";
import { completion } from "./names.js";

export const FORM = "action"; // the id of the form in a dialog, of which there is one at a time

export class Form {
  // fields: [key, label, hint, kind, value, isRequired]; the key is the option's path with slashes. kind: number, text, lines, names
  // (a list, with commas), select:a,b, checks:a,b (some of them), flag; pool:tree and node, names that are completed.
  constructor(fields, onchange = () => {}) {
    this.inputs = new Map();
    this.errors = new Map();
    this.general = h("p.error", { role: "alert" });
    this.element = h("div.fields", fields.map(([key, label, hint, kind, value, isRequired]) => {
      const id = `field-${key.replaceAll("/", "-")}`;
      const shared = { id, name: key, "aria-describedby": `${id}-hint ${id}-error`, oninput: onchange, "aria-required": isRequired ? "true" : null };
      const input = makeInput(kind, value, shared);
      const names = kind === "node" || kind.startsWith("pool:") ? completion(input, kind.split(":")[0], () => kind.slice(5)) : null;
      const error = h("span.error", { id: `${id}-error`, role: "alert" });
      this.inputs.set(key, [input, kind]);
      this.errors.set(key, error);
      return h("div.field", { class: kind === "lines" || kind.startsWith("checks:") ? "wide" : "" }, h("label", { for: id, id: `${id}-label` }, label), input, names,
        h("span.hint", { id: `${id}-hint` }, isRequired ? `required; ${hint}` : hint), error);
    }));
  }

  // The value of a field: null when it is empty; text that is no number is sent as it is, and the scheduler refuses it.
  value(key) {
    const [input, kind] = this.inputs.get(key);
    if (kind === "flag") return input.checked;
    if (kind.startsWith("checks:")) return [...input.querySelectorAll("input:checked")].map((box) => box.value);
    if (kind === "names") return input.value.split(",").map((name) => name.trim()).filter(Boolean);
    const text = kind === "lines" ? input.value : input.value.trim();
    if (text === "") return null;
    if (kind !== "number") return text;
    const number = Number(text);
    return Number.isFinite(number) ? number : text;
  }

  // The values of these fields, without those that are empty.
  given(keys = [...this.inputs.keys()]) {
    return Object.fromEntries(keys.map((key) => [key, this.value(key)]).filter(([, value]) => value !== null));
  }

  clear() {
    this.general.textContent = "";
    for (const [key, [input]] of this.inputs) {
      input.removeAttribute("aria-invalid");
      this.errors.get(key).textContent = "";
    }
  }

  // Shows a refusal beside the field that it is about, or below all fields.
  refuse(message, field) {
    this.clear();
    const key = this.find(message, field);
    if (key === null) {
      this.general.textContent = message;
      return;
    }
    const [input] = this.inputs.get(key);
    input.setAttribute("aria-invalid", "true");
    this.errors.get(key).textContent = message;
    input.focus();
  }

  find(message, field) {
    const keys = [...this.inputs.keys()];
    for (const wanted of [field, ...(message.match(/[a-z_]+(?:\/[a-z_]+)*/g) ?? [])]) {
      if (!wanted) continue;
      const exact = keys.find((key) => key === wanted) ?? keys.find((key) => key.startsWith(`${wanted}/`))
        ?? keys.find((key) => wanted.startsWith(`${key}/`) || wanted.endsWith(`/${key}`));
      if (exact !== undefined) return exact;
    }
    return null;
  }
}

function makeInput(kind, value, shared) {
  if (kind === "flag") return h("input", { type: "checkbox", checked: value === true, ...shared });
  if (kind.startsWith("checks:")) {
    const { oninput, ...others } = shared;
    return h("div.checks", { role: "group", tabindex: "-1", "aria-labelledby": `${shared.id}-label`, ...others }, kind.slice(7).split(",").map((name) =>
      h("label", h("input", { type: "checkbox", value: name, checked: value.includes(name), oninput }), name)));
  }
  if (kind === "names") return makeInput("text", value.join(", "), shared);
  if (kind === "lines") return h("textarea", { value: value ?? "", spellcheck: "false", ...shared });
  if (kind.startsWith("select:")) {
    const options = kind.slice(7).split(",");
    return h("select", { ...shared, value: value ?? options[0] }, options.map((name) => h("option", { value: name }, name)));
  }
  const isNumber = kind === "number";
  return h("input", { type: "text", inputmode: isNumber ? "decimal" : null, autocomplete: "off", value: value === null || value === undefined ? "" : String(value), ...shared });
}

export function readJson(text, what) {
  if (!text) return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Refusal(422, { error: `${what} is not JSON: ${error.message}` });
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Refusal(422, { error: `${what} must be a JSON object, such as {"weight": 2}` });
  return value;
}

// Runs `work` with all buttons disabled; a refusal is shown in the form.
export async function during(dialog, form, work) {
  const buttons = [...dialog.querySelectorAll("button")].filter((button) => !button.disabled);
  const focused = document.activeElement;
  for (const button of buttons) button.disabled = true;
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    form.refuse(error.message, error.attributes.field);
    return null;
  } finally {
    for (const button of buttons) button.disabled = false;
    // A disabled button loses the focus.
    if (dialog.open !== false && [document.body, dialog, focused].includes(document.activeElement)) focused.focus();
  }
}

// Opens a dialog with `form` and a button that does `work`. Once it is done, `done(answer, dialog)` is called; without it
// the dialog is closed and the page loaded again. `before` and `after` stand around the fields, `buttons` before the button.
export function openForm(title, form, label, work, { app, done, tone = "primary", before, after, buttons = [], onclose }) {
  const submit = async (event) => {
    event.preventDefault();
    form.clear();
    const answer = await during(dialog, form, work);
    if (answer === null) return;
    if (done) return done(answer, dialog);
    dialog.close();
    app.reload();
  };
  const go = h("button", { type: "submit", form: FORM, class: tone }, label);
  const dialog = openDialog(title, h("form", { id: FORM, onsubmit: submit }, before, form.inputs.size ? form.element : null, form.general, after), [...buttons, go], onclose);
  return dialog;
}

// Shows what came of a change that was made, with its warnings, in place of the form.
export function openNotice(dialog, content, warnings, label = "Close", act = () => dialog.close()) {
  const button = h("button.primary", { type: "button", onclick: act }, label);
  dialog.querySelector(".dialog-body").replaceChildren(h("div.part", { role: "alert" }, content, warnings.map((each) => h("p.note", each))));
  dialog.querySelector("footer").replaceChildren(button);
  button.focus();
}
