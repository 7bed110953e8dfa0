// Keys of the whole page: / to search, ? for help, Ctrl-K or Cmd-K to go anywhere.

import { h, openDialog } from "./dom.js";

const KEYS = [
  ["/", "go to the search field or first filter of this page"],
  ["Ctrl-K, ⌘-K", "find a page, pool, operation or node, and go there"],
  ["?", "show these keys"],
  ["Tab, Shift-Tab", "go to the next or previous link, button or field"],
  ["Enter", "follow a link, press a button, sort by a column"],
  ["↑ ↓, Page Up, Page Down, Home, End", "scroll a table"],
  ["← →", "fold and unfold a pool"],
  ["Escape", "close a dialog"],
  ["← →, Shift, + −", "in a graph: read values, select (Enter zooms), zoom; with the mouse: drag to zoom in, double-click to zoom out"],
];

// `openPalette`: what Ctrl-K does, null where there is nothing to find.
export function installKeys(openPalette = null) {
  window.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.altKey || event.isComposing) return;
    const isOpen = document.querySelector("dialog[open]");
    if (openPalette && (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && !event.shiftKey) {
      event.preventDefault();
      if (!isOpen) openPalette();
    } else if (!event.ctrlKey && !event.metaKey && !isOpen && !isTyping(event.target)) {
      if (event.key === "/") focusSearch(event);
      else if (event.key === "?") openHelp(KEYS.filter(([keys]) => openPalette || !keys.startsWith("Ctrl-K")));
    }
  });
}

const isTyping = (element) => element.isContentEditable || /^(input|select|textarea)$/i.test(element.nodeName);

function focusSearch(event) {
  const field = [...document.querySelectorAll("main :is(input[type=search], .filters input)")].find((each) => each.checkVisibility());
  if (!field) return;
  event.preventDefault();
  field.focus();
  field.select();
}

const openHelp = (known) => openDialog("Keys", h("dl.keys", known.map(([keys, text]) => h("div", { key: keys },
  h("dt", keys.split(", ").map((key, index) => [index ? " " : null, h("kbd", key)])), h("dd", text)))), []);
