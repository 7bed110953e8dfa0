// Explanations in a box: while the pointer or the focus is on what has one, and after a touch. Escape closes it. Screen
// readers read the attribute that the text is in.

import { h } from "./dom.js";
import { GLOSSARY } from "./glossary.js";

const HIDE_MS = 200; // the pointer may go on into the box
const SPACE_PX = 6;
const TEXTS = new Map(GLOSSARY.flatMap(([names, text]) => names.toLowerCase().split(", ").map((name) => [name, text])));

// A label as it stands in a head of a table or before a value, a text or a button that sorts; with a tip where the
// glossary knows it, or `help` is given.
export function label(name, help) {
  const isButton = name instanceof HTMLButtonElement;
  const known = TEXTS.get(String(isButton ? name.firstChild.textContent : name).toLowerCase());
  const text = known && help ? `${known} Here: ${help}` : known ?? help;
  if (!text) return name;
  const word = isButton ? name : h("button", { type: "button" }, name);
  word.classList.add("term");
  word.setAttribute("aria-description", text);
  return word;
}

// Called once for a page.
export function watchTips() {
  const box = h("div.tip", { popover: "manual", "aria-hidden": "true" });
  let shown = null;
  let timer = 0;
  const hide = () => {
    clearTimeout(timer);
    shown = null;
    box.hidePopover();
  };
  const place = () => {
    if (!shown) return;
    const at = shown.getBoundingClientRect();
    const { width, height } = box.getBoundingClientRect();
    const below = at.bottom + SPACE_PX;
    box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
    box.style.top = `${below + height < innerHeight ? below : Math.max(8, at.top - height - SPACE_PX)}px`;
  };
  const show = (node) => {
    clearTimeout(timer);
    if (shown === node) return;
    shown = node;
    box.textContent = node.getAttribute("aria-description");
    if (!box.matches(":popover-open")) box.showPopover();
    place();
  };
  const look = ({ target }) => {
    const node = target instanceof Element ? target.closest("[aria-description]") : null;
    if (node) show(node);
    else if (box.contains(target)) clearTimeout(timer);
    else if (shown && !shown.matches(":focus-visible")) {
      clearTimeout(timer);
      timer = setTimeout(hide, HIDE_MS);
    }
  };
  document.body.append(box);
  for (const type of ["pointerover", "pointerdown", "click", "focusin"]) document.addEventListener(type, look);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", place, { capture: true, passive: true });
  window.addEventListener("hashchange", () => { if (!shown?.isConnected) hide(); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !shown) return;
    hide();
    event.preventDefault(); // a dialog below it stays
    event.stopPropagation();
  }, { capture: true });
}
