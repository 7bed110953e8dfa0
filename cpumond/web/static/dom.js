// Elements from values. A page builds a fresh tree of elements from its data; `morph` makes the page equal to that tree
// and keeps what is the same, so that focus, selection and scroll positions stay. Text is always text: nothing here
// parses markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "open", "indeterminate"]);

// h("div.row", {class, id, onclick, style: {width: "50%"}, "aria-label": text, key}, child, [children], "text", null)
export function h(name, attributes, ...children) {
  if (attributes instanceof Node || typeof attributes !== "object" || attributes === null || Array.isArray(attributes)) {
    if (attributes !== undefined) children.unshift(attributes);
    attributes = {};
  }
  const [tag, ...classes] = name.split(".");
  const node = tag === "svg" || tag.startsWith("svg:")
    ? document.createElementNS(SVG, tag.replace("svg:", ""))
    : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  node.handlers = {};
  node.given = {};
  for (const [key, value] of Object.entries(attributes)) set(node, key, value);
  append(node, children);
  if (tag === "select" && "value" in node.given) node.value = node.given.value;
  return node;
}

function set(node, key, value) {
  if (value === undefined || value === null || value === false) return;
  if (key === "key") node.key = value;
  else if (key.startsWith("on")) {
    node.handlers[key.slice(2)] = value;
    addOne(node, key.slice(2));
  } else if (key === "style") for (const [name, text] of Object.entries(value)) node.style.setProperty(name, text);
  else if (PROPERTIES.has(key)) {
    node[key] = value;
    node.given[key] = value;
  } else if (key === "class") {
    const before = node.getAttribute("class");
    node.setAttribute("class", before ? `${before} ${value}` : value);
  } else node.setAttribute(key, value === true ? "" : key === "title" || key === "aria-label" ? visible(String(value)) : String(value));
}

function addOne(node, type) {
  node.listening ??= new Set();
  if (node.listening.has(type)) return;
  node.listening.add(type);
  node.addEventListener(type, (event) => node.handlers[type]?.(event));
}

// Control characters, and marks that turn the direction of the text around them, as text: \x1b, \u202e.
export const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (sign) => {
  const code = sign.codePointAt(0).toString(16);
  return code.length < 3 ? `\\x${code.padStart(2, "0")}` : `\\u${code}`;
});

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === "") continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : visible(String(child)));
  }
}

// An element that manages its own content: create(node, props) once, update(node, props), if there is one, when its page is drawn again,
// destroy(node) when it is removed. Elements of the same `kind` and `key` are the same island.
export const island = (kind, key, props, tag = "div") => Object.assign(h(tag), { island: kind, key, props });

// Creates the islands of a tree that was just put into the page.
export function settle(node) {
  if (!node.island) for (const child of node.children ?? []) settle(child);
  else if (!node.isSettled) {
    node.isSettled = true;
    node.island.create(node, node.props);
  }
}

export function release(node) {
  if (!node.island) for (const child of node.children ?? []) release(child);
  else if (node.isSettled) node.island.destroy?.(node);
}

// Makes `node` equal to `wanted`; returns the node that is in the page afterwards.
export function morph(node, wanted) {
  if (!isSame(node, wanted)) {
    release(node);
    node.replaceWith(wanted);
    settle(wanted);
    return wanted;
  }
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
    return node;
  }
  if (node.island) {
    node.props = wanted.props;
    node.island.update?.(node, wanted.props);
    return node;
  }
  morphAttributes(node, wanted);
  morphChildren(node, wanted);
  for (const [name, value] of Object.entries(wanted.given ?? {})) {
    // An input that has the focus keeps what is being typed.
    const typing = name === "value" && document.activeElement === node;
    if (!typing && node[name] !== value) node[name] = value;
  }
  if ("disabled" in node && !wanted.given?.disabled && node.disabled) node.disabled = false;
  node.handlers = wanted.handlers ?? {};
  for (const type of Object.keys(node.handlers)) addOne(node, type);
  return node;
}

const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.key === b.key && a.island === b.island;

function morphAttributes(node, wanted) {
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  for (const { name } of [...node.attributes]) {
    // A dialog or a fold that the user opened stays open.
    if (!wanted.hasAttribute(name) && name !== "style" && name !== "open") node.removeAttribute(name);
  }
  if (node.style?.cssText !== wanted.style?.cssText) node.style.cssText = wanted.style.cssText;
}

function morphChildren(node, wanted) {
  const children = [...wanted.childNodes];
  const keys = new Set(children.map((child) => child.key));
  const byKey = new Map();
  for (const child of [...node.childNodes]) {
    if (child.key === undefined) continue;
    if (!keys.has(child.key)) drop(child);
    else if (!byKey.has(child.key)) byKey.set(child.key, child);
  }
  let here = node.firstChild;
  for (const next of children) {
    const known = next.key === undefined ? findLike(here, next) : byKey.get(next.key);
    byKey.delete(next.key); // a second one of the same key is another
    if (known && isSame(known, next)) {
      if (known === here) here = here.nextSibling;
      else move(node, known, here);
      morph(known, next);
    } else {
      node.insertBefore(next, here);
      settle(next);
    }
  }
  while (here) {
    const after = here.nextSibling;
    drop(here);
    here = after;
  }
}

// The sibling from `here` on that becomes `next`: the first of the same class, so that an element and the focus in it
// stay when one before it is removed; else any that fits.
function findLike(here, next) {
  let any = null;
  for (let each = here; each; each = each.nextSibling) {
    if (!isSame(each, next)) continue;
    if (each.nodeType !== Node.ELEMENT_NODE || each.getAttribute("class") === next.getAttribute("class")) return each;
    any ??= each;
  }
  return any;
}

// Moves a child among its siblings; an element in it that has the focus keeps it.
function move(node, child, before) {
  if (node.moveBefore && node.isConnected) return node.moveBefore(child, before);
  const focused = child.contains(document.activeElement) ? document.activeElement : null;
  node.insertBefore(child, before);
  focused?.focus({ preventScroll: true });
}

export function drop(node) {
  release(node);
  node.remove();
}

// What stands in the place of an answer that is awaited; a screen reader says the word.
export const skeleton = (attributes = {}) => h("div.loading", attributes, h("span.hidden-text", "Loading …"), [1, 2, 3].map((key) => h("span.bone", { key, "aria-hidden": "true" })));

// Opens a modal dialog; `body` is an element, `buttons` are elements. Closing removes it.
export function openDialog(title, body, buttons, onclose) {
  const id = `dialog-${Math.random().toString(36).slice(2)}`;
  const opener = document.activeElement;
  const dialog = h("dialog.dialog", { "aria-labelledby": id, onclose: () => { dialog.remove(); returnFocus(opener); onclose?.(); } },
    h("header", h("h2", { id }, title),
      h("button.plain", { type: "button", "aria-label": "Close", onclick: () => dialog.close() }, "✕")),
    h("div.dialog-body", body), h("footer", buttons));
  document.body.append(dialog);
  settle(dialog);
  dialog.showModal();
  // The focus goes to the first field or button, and not to the button that closes the dialog, which comes first.
  dialog.querySelector(".dialog-body :is(input, select, textarea), footer button")?.focus();
  return dialog;
}

// Moves the focus to the element that opened the dialog; where that is gone, to the beginning of the page.
function returnFocus(opener) {
  const isThere = opener?.isConnected && opener !== document.body;
  (isThere ? opener : document.querySelector("main h1") ?? document.querySelector("main")).focus({ preventScroll: true });
}
