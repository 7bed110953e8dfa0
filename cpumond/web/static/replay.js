// The map of nodes at moments of the last day, one after the other.

import { get, query } from "./api.js";
import { h } from "./dom.js";
import { hours, time } from "./format.js";
import { historyIsOff } from "./history.js";

const STEP_MS = 200;

// The nodes as they were at the chosen moment: `past` is the measure relative to the capacity, null where unknown.
export function replayed(nodes, measure, { local: { replay } }) {
  if (!replay?.map || replay.measure !== measure) return nodes;
  const percents = replay.map.percents[replay.at];
  const past = new Map(replay.map.nodes.map((id, index) => [id, percents[index]]));
  return nodes.map((node) => ({ ...node, past: past.has(node.id) && past.get(node.id) !== null ? past.get(node.id) / 100 : null }));
}

export function replayControls(tree, measure, app) {
  const { replay } = app.local;
  if (replay?.measure !== measure) return h("button.choice", { type: "button", key: "replay", onclick: () => openReplay(tree, measure, app) }, "Replay 24 hours");
  const button = (key, text, act) => h("button.choice", { type: "button", key, onclick: act }, text);
  const { map } = replay;
  const back = button("now", "Back to now", () => { app.local.replay = null; app.redraw(); });
  if (!map) return h("div.replay", { key: "replay" }, h("span.muted", { role: "status" }, replay.problem ?? "Reading the last 24 hours …"), back);
  const moment = `${time(map.times[replay.at])}: ${hours(map.twice_core_hours[replay.at])} core-hours used twice so far`;
  return h("div.replay", { key: "replay" },
    button("play", replay.isPlaying ? "Pause" : "Play", () => play(replay, !replay.isPlaying, app)),
    h("input", { type: "range", min: "0", max: String(map.times.length - 1), value: String(replay.at), "aria-label": "Moment of the replay", "aria-valuetext": moment,
      oninput: (event) => { replay.isPlaying = false; replay.at = Number(event.target.value); app.redraw(); } }),
    h("span", { title: "What the jobs of all nodes requested beyond the capacity of their nodes, since the beginning of the replay" }, moment), back);
}

export async function openReplay(tree, measure, app) {
  clearInterval(app.local.replay?.timer);
  const replay = app.local.replay = { at: 0, isPlaying: true, ...app.local.replay, measure, map: null, problem: null };
  app.redraw();
  const isOff = await historyIsOff();
  const answer = isOff ? null : await get(`/node_map${query({ tree, measure })}`).catch((error) => { replay.problem = error.message; });
  if (app.local.replay !== replay) return;
  if (answer?.times.length) Object.assign(replay, { map: answer, at: Math.min(replay.at, answer.times.length - 1) });
  else replay.problem ??= isOff ? "History is turned off." : "No points yet: the first one comes within a minute.";
  play(replay, replay.isPlaying, app);
}

function play(replay, isPlaying, app) {
  clearInterval(replay.timer);
  replay.isPlaying = isPlaying && Boolean(replay.map);
  const last = (replay.map?.times.length ?? 1) - 1;
  if (isPlaying && replay.at >= last) replay.at = 0;
  if (replay.isPlaying) {
    replay.timer = setInterval(() => {
      if (app.local.replay === replay && replay.isPlaying && replay.at < last) replay.at += 1;
      else replay.isPlaying = false;
      if (!replay.isPlaying) clearInterval(replay.timer);
      if (app.local.replay === replay) app.redraw();
    }, STEP_MS);
  }
  app.redraw();
}
