// Events as marks in graphs: what happened in the time that is shown.

import { get, query, serverNow } from "./api.js";
import { withoutIds } from "./format.js";
import { askedTime, remember } from "./history.js";
import { to } from "./route.js";

const MARKS_MS = 10000;
const PATIENCE_MS = 400;
const LIMIT = 200; // the newest of each kind are marked

const TONES = { node_lost: "bad", node_silent: "warn", node_returned: "good", node_failing: "bad", node_works: "good", preemption: "warn", operation_failed: "bad", operation_stuck: "warn", limit_contested: "bad", take_over: "warn" };
export const OF_NODES = ["node_lost", "node_silent", "node_returned", "node_failing", "node_works"];
// Changes of trees and pools.
export const CHANGES = "command&changes";

// The marks of the events about {tree, pool, node, operation}, of these kinds.
export async function readMarks(about, kinds) {
  const answers = await Promise.all(kinds.map((kind) => {
    const where = `/events${query({ ...about, ...askedTime(), kind: kind.split("&")[0], changes: kind === CHANGES ? "true" : null, limit: LIMIT })}`;
    return remember(where, MARKS_MS, () => get(where), PATIENCE_MS);
  }));
  return answers.flatMap(({ value }) => value?.events ?? []).map((event) => ({
    at: event.at, text: withoutIds(event.text), tone: TONES[event.kind], tree: event.tree, job: event.job,
    // It is the first one there.
    href: to("events", { before: event.number + 1 }),
  }));
}

// The marks of decisions about a job's limit, as its agent explains them.
export const markDecisions = ({ decisions }, show, go) => decisions.filter(({ at }) => at <= serverNow()).map((decision) => ({
  at: decision.at, tone: decision.kind === "restore" ? "bad" : decision.kind === "grow" ? "warn" : "good",
  text: `${decision.kind}, ${show(decision.old_cores)} → ${show(decision.new_cores)} cores: ${decision.reason || decision.result}`,
  href: location.hash || "#/", onclick: go,
}));
