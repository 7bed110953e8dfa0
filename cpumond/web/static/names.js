// Names as they are typed: the scheduler is asked for those that fit, a part of them at a time.

import { get, query } from "./api.js";
import { h } from "./dom.js";

const TYPING_MS = 150;
const SHOWN = 20;

// Pools of a tree ("" for the default one) or nodes that have `text` in their names: [{id}, ...].
export const findNames = async (kind, text, { tree = "", signal, limit = SHOWN } = {}) => (await get(`/find${query({ kind, name: text, tree, within: "true", limit })}`, { signal })).matches;

// Completes what is typed in `input`; `tree` is a function. Returns what has to stand beside it in the page.
export function completion(input, kind, tree = () => "") {
  const list = h("datalist", { id: `${input.id}-names` });
  let asked;
  let timer = 0;
  input.setAttribute("list", list.id);
  const ask = async () => {
    asked?.abort();
    asked = new AbortController();
    const found = await findNames(kind, input.value.trim(), { tree: tree(), signal: asked.signal }).catch(() => null);
    if (found) list.replaceChildren(...found.map(({ id }) => h("option", { value: id })));
  };
  input.addEventListener("focus", ask);
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, TYPING_MS);
  });
  return list;
}
