// The pages of the scheduler.

import { link, request, Refusal } from "./api.js";
import { start } from "./app.js";
import { installKeys } from "./keys.js";
import { overview } from "./page_overview.js";
import { pools } from "./page_pools.js";
import { to } from "./route.js";

const SPARE_MS = 1500;
const LOAD_ANEW_MS = 60000;
const others = [];

// A page whose module (page_*.js) is loaded when it is first opened, or a little after the first page is shown.
function later(name, module = name) {
  const find = async () => (await import(`./page_${module}.js`))[name];
  const page = {
    async load(params, options) {
      let found;
      try {
        found = await find();
      } catch {
        await loadAnew();
        throw new Refusal(0, { error: `${link.problem || "a part of this page is missing"}; this page tries again by itself` });
      }
      Object.assign(page, found);
      return page.load(params, options);
    },
    view: () => null,
  };
  others.push(find);
  return page;
}

// A browser may remember that a module could not be loaded: when the server answers, the whole page is loaded again, at
// most once in LOAD_ANEW_MS.
async function loadAnew() {
  await request("GET", "/healthz").catch(() => null);
  const last = Number(sessionStorage.getItem("cpumond-loaded-anew") ?? 0);
  if (link.failingSince !== null || Date.now() - last < LOAD_ANEW_MS) return;
  sessionStorage.setItem("cpumond-loaded-anew", String(Date.now()));
  location.reload();
}

setTimeout(() => Promise.allSettled(others.map((find) => find())), SPARE_MS);

// The address that the yt client prints for an operation: /?page=operation&mode=detail&id=ID&tab=details
const asked = new URLSearchParams(location.search);
if (asked.get("page") === "operation" && asked.get("id")) history.replaceState(null, "", `${location.pathname}${to("operations", asked.get("id"))}`);

// What can be gone to by a name.
const loadPalette = () => import("./palette.js");
others.push(loadPalette);
const find = async () => (await loadPalette()).openPalette([...app.options.menu, ["You, and your tokens", "#/tokens"]]);
installKeys(find);

export const app = start({
  name: "cpumond",
  find,
  health: () => request("GET", "/healthz"),
  me: () => request("GET", "/api/v1/me"),
  menu: [
    ["Overview", "#/", ""],
    ["Pools", "#/pools", ["pools", "guarantees"]],
    ["Operations", "#/operations", "operations"],
    ["My work", "#/mine", "mine"],
    ["Nodes", "#/nodes", "nodes"],
    ["Fleet", "#/fleet", "fleet"],
    ["Preemptions", "#/preemptions", "preemptions"],
    ["Savings", "#/savings", "savings"],
    ["Events", "#/events", "events"],
    ["What if", "#/what-if", "what-if"],
    ["Audit log", "#/audit", "audit"],
  ],
  pages: [
    [[], overview],
    [["pools"], pools],
    [["pools", ":tree"], pools],
    [["pools", ":tree", ":pool"], later("pool")],
    [["guarantees", ":tree"], later("guarantees")],
    [["operations"], later("operations")],
    [["operations", ":operation"], later("operation")],
    [["operations", ":operation", "jobs", ":job"], later("job")],
    [["mine"], later("mine")],
    [["nodes"], later("nodes")],
    [["nodes", ":node"], later("node")],
    [["fleet"], later("fleet")],
    [["preemptions"], later("preemptions")],
    [["savings"], later("savings")],
    [["events"], later("events")],
    [["audit"], later("audit", "events")],
    [["tokens"], later("tokens")],
    [["what-if"], later("whatIf", "what_if")],
  ],
});
