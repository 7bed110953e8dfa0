// Guarantees of a tree's pools as bars to be dragged: what all shares would be, before any of it is applied.

import { drawPlan, openUndo } from "./actions.js";
import { get, path, query, Refusal, send, session } from "./api.js";
import { h, openDialog } from "./dom.js";
import { evenly } from "./format.js";
import { loadPoolTable } from "./page_pools.js";
import { ROOT } from "./rights.js";
import { to } from "./route.js";

const PERIOD_MS = 5000;
const STEPS = 100; // at least, of a bar

let tried = { of: "", cores: {} }; // of: the session and the tree; pool -> cores of its strong guarantee
let isAsking = false;
let isAskedAgain = false;

export const guarantees = {
  title: ({ tree }) => `Guarantees of ${tree}`,
  period: PERIOD_MS,
  async load({ tree }, { signal }) {
    const [{ revision, tables: { pools } }, table] = await Promise.all([get(path`/trees/${tree}/file`, { signal }), loadPoolTable(tree, { signal })]);
    const of = `${session()} ${tree}`;
    if (tried.of !== of) tried = { of, cores: {} };
    const cores = { ...tried.cores };
    const change = { tables: { pools: pools.map((pool) => withGuarantee(pool, cores[pool.name])) }, base: revision };
    const plan = await send("POST", "/plan?everything=true", { type: "ApplyTree", tree, ...change }).catch((error) => {
      if (!(error instanceof Refusal) || error.status === 0) throw error;
      return { accepted: false, refusal: error.message, warnings: [], notes: [], effects: [] };
    });
    return { pools, cores, change, plan, total: table.total.cpu ?? 0 };
  },
  view({ pools, cores, change, plan, total }, { tree }, app) {
    const isTried = Object.keys(tried.cores).length > 0;
    const isReady = isTried && plan.accepted && JSON.stringify(cores) === JSON.stringify(tried.cores);
    const button = (text, act, isOff, tone = null) => h("button", { type: "button", class: tone, disabled: isOff, onclick: act }, text);
    return [
      h("nav.crumbs", { "aria-label": "Where this is" }, h("a", { href: to("pools", tree) }, `Pools of ${tree}`), h("span", { "aria-current": "page" }, "Guarantees")),
      h("div.heading", h("h1", "Guarantees"), h("div.actions",
        app.local.undo ? button("Undo", () => openUndo(app.local.undo, app), false) : null,
        button("Copy as a tree file", () => showFile(tree, change.tables.pools, cores), !isReady),
        button("Reset", () => { tried.cores = {}; ask(app); }, !isTried), button("Apply", () => apply(tree, change, plan, app), !isReady, "primary"))),
      h("p.muted.flat", "Drag a guarantee: the bars show the fair share that each pool would have now. Nothing changes until you apply it."),
      plan.refusal ? h("p.error", { role: "alert" }, plan.refusal) : null,
      isTried ? [...plan.warnings, ...plan.notes].map((sentence) => h("p.note", { key: sentence }, sentence)) : null,
      pools.length ? h("section.card", { "aria-label": "Guarantees" }, legend(), rows(pools, plan, total, app)) : h("p.note", "This tree has no pools."),
      isReady ? h("details", { key: "changes" }, h("summary", "All changes"), drawPlan({ ...plan, warnings: [], notes: [] })) : null,
    ];
  },
};

const withGuarantee = (pool, cores) => (cores === undefined ? pool : { ...pool, options: { ...pool.options, strong_guarantee_resources: { ...pool.options?.strong_guarantee_resources, cpu: cores } } });

const guaranteeOf = (pool) => pool.options?.strong_guarantee_resources?.cpu ?? 0;

const legend = () => h("ul.glance-legend", { "aria-label": "Parts of a bar" }, [["by_weight", "fair share with these guarantees"], ["before", "fair share now"], ["handle", "strong guarantee"]].map(([name, word]) =>
  h("li", { key: name }, h("span.square", { class: name, "aria-hidden": "true" }), word)));

function rows(pools, plan, total, app) {
  const shares = new Map(plan.effects.filter(({ kind }) => kind === "pool").map(({ name, before, after }) => [name, [before, after].map((each) => each?.fair_share.cpu ?? 0)]));
  const most = Math.max(total, ...pools.map(guaranteeOf)) || 1;
  const at = (value) => `${(100 * Math.min(value / most, 1)).toFixed(2)}%`;
  const texts = evenly(pools.flatMap((pool) => [...shares.get(pool.name) ?? [0, 0], tried.cores[pool.name] ?? guaranteeOf(pool)]));
  const depths = new Map([[ROOT, -1]]);
  return h("ul.drags", pools.map((pool, index) => {
    const { name, parent } = pool;
    depths.set(name, (depths.get(parent) ?? -1) + 1);
    const value = tried.cores[name] ?? guaranteeOf(pool);
    const [before, after] = shares.get(name) ?? [0, 0];
    const [now, would, guarantee] = texts.slice(3 * index, 3 * index + 3);
    return h("li", { key: name }, h("label", { for: `drag-${index}`, style: { "--depth": depths.get(name) } }, name),
      h("span.drag", h("span.by_weight", { "aria-hidden": "true", style: { width: at(after) } }), h("span.before", { "aria-hidden": "true", style: { left: at(before) } }),
        h("input", { id: `drag-${index}`, type: "range", min: "0", max: String(most), step: String(10 ** Math.floor(Math.log10(most / STEPS))), value: String(value),
          "aria-valuetext": `${guarantee} cores; fair share ${would}`, oninput: ({ target }) => choose(pool, Number(target.value), app) })),
      h("span.line", `${guarantee} guaranteed; fair share ${now === would ? now : `${now} → ${would}`} cores`));
  }));
}

function choose(pool, cores, app) {
  if (cores === guaranteeOf(pool)) delete tried.cores[pool.name];
  else tried.cores[pool.name] = cores;
  ask(app);
}

// Asks for one plan at a time, and once more where something was dragged meanwhile.
async function ask(app) {
  app.redraw();
  isAskedAgain = isAsking;
  if (isAsking) return;
  isAsking = true;
  try {
    do {
      isAskedAgain = false;
      await app.reload();
    } while (isAskedAgain);
  } finally {
    isAsking = false;
  }
}

async function apply(tree, change, plan, app) {
  try {
    await send("POST", path`/trees/${tree}/apply`, change, plan);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    openDialog("Not applied", h("p.error", error.message), []);
    return;
  }
  tried.cores = {};
  const { events } = await get(`/events${query({ tree, kind: "command", changes: "true", limit: 1 })}`);
  app.local.undo = events[0];
  app.reload();
}

// The pools with other guarantees and those above them: a file that names a pool has all of its options.
function showFile(tree, pools, cores) {
  const tables = new Map(pools.map(({ name, options = {}, attributes }) => [name, { ...options, ...(attributes ? { attributes } : {}) }]));
  const parents = new Map(pools.map(({ name, parent }) => [name, parent]));
  const file = { tree, pools: {} };
  const put = (name) => {
    const above = parents.get(name);
    const place = above === ROOT ? file.pools : put(above).pools ??= {};
    return place[name] ??= tables.get(name);
  };
  Object.keys(cores).forEach(put);
  const text = JSON.stringify(file, null, 2);
  const copy = navigator.clipboard ? [h("button.primary", { type: "button", onclick: () => navigator.clipboard.writeText(text) }, "Copy")] : [];
  openDialog("Tree file", [h("p", "Save it as pools.json; ", h("code", "cpumond tree apply pools.json"), " applies it."), h("pre.whole", { tabindex: "0" }, text)], copy);
}
