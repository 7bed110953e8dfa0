// What the asker may do, as the scheduler says it. It checks each request itself, too: a button that it would refuse says
// why, and cannot be used.

import { get, path } from "./api.js";
import { h } from "./dom.js";
import { remember } from "./history.js";

export const ROOT = "<Root>";

const TREES_KEPT_MS = 10000;
const RIGHTS_MS = 10000;

let trees = { at: 0, value: null };

export async function loadTrees(options) {
  if (!trees.value || Date.now() - trees.at > TREES_KEPT_MS) {
    const value = await get("/trees", options);
    trees = { at: Date.now(), value };
  }
  return trees.value;
}

// {tree: {pool: [permissions]}} of all trees, or of this one. A tree without an answer is left out.
export async function readRights(tree, options) {
  const names = tree ? [tree] : (await loadTrees(options)).trees.map(({ name }) => name);
  const answers = await Promise.all(names.map(async (name) =>
    [name, (await remember(`rights/${name}`, RIGHTS_MS, () => get(path`/trees/${name}` + "/rights"))).value?.pools]));
  return Object.fromEntries(answers.filter(([, pools]) => pools));
}

// Whether one of these permissions on a pool is among `rights`; true where they are not known.
export const mayOn = (rights, tree, pool, ...permissions) => {
  const pools = rights?.[tree];
  return !pools || permissions.some((permission) => (pools[pool || ROOT] ?? pools[ROOT] ?? []).includes(permission));
};

// The first pool on which they have this permission, the root before others; undefined: there is none.
export const firstWith = (pools, permission) => (pools ? [ROOT, ...Object.keys(pools)].find((pool) => pools[pool]?.includes(permission)) : ROOT);

// A button for something that may be refused: `reason` is why, "" where it is allowed.
export function guarded(label, act, { reason = "", tone = "" } = {}) {
  return h("button", {
    type: "button", class: tone || null, title: reason || null, "aria-disabled": reason ? "true" : null, onclick: reason ? () => {} : act,
  }, label);
}
