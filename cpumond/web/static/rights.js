// What the asker may do, as the scheduler says it. It checks each request itself, too: a button that it would refuse says
// why, and cannot be used.

import { get, path, token } from "./api.js";
import { h } from "./dom.js";
import { remember } from "./history.js";

export const ROOT = "<Root>";

const TREES_KEPT_MS = 10000;
const RIGHTS_MS = 10000;

let trees = { at: 0, of: null, value: null };

export async function loadTrees(options) {
  if (trees.of !== token() || Date.now() - trees.at > TREES_KEPT_MS) {
    const of = token();
    const value = await get("/trees", options);
    trees = { at: Date.now(), of, value };
  }
  return trees.value;
}

// {tree: {pool: [permissions]}} of all trees, or of this one. Left out are trees on which the asker may do everything: of
// thousands of pools it would be long.
export async function readRights(tree) {
  const all = (await loadTrees()).trees;
  const asked = all.filter(({ name, may }) => (!tree || name === tree) && Object.values(may ?? {}).some(Boolean));
  const answers = await Promise.all(asked.map(async ({ name }) =>
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
