// The pages of the scheduler.

import { link, request, Refusal } from "./api.js";
import { start } from "./app.js";
import { overview } from "./page_overview.js";
import { pools } from "./page_pools.js";

const SPARE_MS = 1500;
const others = [];

// A page whose module is not needed for the first one that is shown: it comes when it is asked for, or a little later.
function later(find) {
  const page = {
    async load(params, options) {
      let found;
      try {
        found = await find();
      } catch (error) {
        link.failingSince ??= Date.now();
        link.problem = "a part of this page could not be loaded";
        throw new Refusal(0, { error: `${link.problem}; load it again (${error.message})` });
      }
      Object.assign(page, found);
      return page.load(params, options);
    },
    view: () => null,
  };
  others.push(find);
  return page;
}

const job = later(async () => (await import("./page_job.js")).job);
const node = later(async () => (await import("./page_node.js")).node);
const nodes = later(async () => (await import("./page_nodes.js")).nodes);
const operation = later(async () => (await import("./page_operation.js")).operation);
const operations = later(async () => (await import("./page_operations.js")).operations);
const pool = later(async () => (await import("./page_pool.js")).pool);
const preemptions = later(async () => (await import("./page_preemptions.js")).preemptions);

setTimeout(() => Promise.allSettled(others.map((find) => find())), SPARE_MS);

start({
  name: "cpumond",
  health: () => request("GET", "/healthz"),
  menu: [
    ["Overview", "#/", ""],
    ["Pools", "#/pools", "pools"],
    ["Operations", "#/operations", "operations"],
    ["Nodes", "#/nodes", "nodes"],
    ["Preemptions", "#/preemptions", "preemptions"],
  ],
  pages: [
    [[], overview],
    [["pools"], pools],
    [["pools", ":tree"], pools],
    [["pools", ":tree", ":pool"], pool],
    [["operations"], operations],
    [["operations", ":operation"], operation],
    [["operations", ":operation", "jobs", ":job"], job],
    [["nodes"], nodes],
    [["nodes", ":node"], node],
    [["preemptions"], preemptions],
  ],
});
