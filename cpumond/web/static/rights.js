// What the asker may do, as the scheduler says it. It checks each request itself, too: a button that it would refuse says
// why, and cannot be used.

import { get, path, session } from "./api.js";
import { h } from "./dom.js";
import { remember } from "./history.js";

export const ROOT = "<Root>";

const TREES_KEPT_MS = 10000;
const RIGHTS_MS = 10000;

let trees = { at: 0, of: null, value: null };

export async function loadTrees(options) {
  if (trees.of !== session() || Date.now() - trees.at > TREES_KEPT_MS) trees = { of: session(), value: await get("/trees", options), at: Date.now() };
  return trees.value;
}

// {tree: {pool: [permissions]}} of all trees, or of this one; null for a tree on which the asker may do everything, since
// the answer is long where there are thousands of pools.
export async function readRights(tree) {
  const all = (await loadTrees()).trees.filter(({ name }) => !tree || name === tree);
  const read = async (name) => (await remember(`rights/${name}`, RIGHTS_MS, () => get(path`/trees/${name}` + "/rights"))).value?.pools ?? null;
  return Object.fromEntries(await Promise.all(all.map(async ({ name, may }) =>
    [name, Object.values(may).some(Boolean) ? await read(name) : null])));
}

// Whether one of these permissions on a pool is among `rights`; true where they are null.
export const mayOn = (rights, tree, pool, ...permissions) => {
  const pools = rights[tree];
  const known = pools && Object.hasOwn(pools, pool || ROOT) ? pool || ROOT : ROOT; // one may be called "constructor"
  return !pools || permissions.some((permission) => (pools[known] ?? []).includes(permission));
};

// The first of a tree's pools with this permission, the root before others; undefined: there is none.
export const firstWith = (pools, permission) => (pools ? [ROOT, ...Object.keys(pools)].find((pool) => pools[pool]?.includes(permission)) : ROOT);

// A button for something that may be refused: `reason` is why, "" where it is allowed.
export const guarded = (label, act, { reason = "", tone = "" } = {}) => h("button", {
  type: "button", class: tone || null, title: reason || null, "aria-disabled": reason ? "true" : null, onclick: reason ? () => {} : act,
}, label);
