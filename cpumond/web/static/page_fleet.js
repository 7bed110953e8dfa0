// All agents: version, what they do to limits, problems; and the stages of the roll-out, with buttons for administrators.

import { get, send } from "./api.js";
import { PERIOD_MS } from "./app.js";
import { chosenColumns, columnMenu } from "./columns.js";
import { h, morph, openDialog } from "./dom.js";
import { during, Form, FORM, openForm, openNotice } from "./forms.js";
import { count, number } from "./format.js";
import { guarded } from "./rights.js";
import { to } from "./route.js";
import { badge, bigTable, table } from "./table.js";

const MAX_GROUPS = 30;
const EVERY_NODE = "%true";
const MOST_NAMES = 3;
const PERIOD_OF_AGENT_MS = 2; // thousands of agents are megabytes

export const fleet = {
  title: () => "Fleet",
  async load(_, { signal }) {
    const [me, all, rollout] = await Promise.all([get("/me", { signal }), get("/fleet", { signal }), get("/rollout", { signal })]);
    this.period = PERIOD_MS + all.agents.length * PERIOD_OF_AGENT_MS;
    return { me, agents: all.agents, stages: rollout.stages };
  },
  view({ me, agents, stages }, _, app) {
    const reason = me.is_admin ? "" : "Only administrators may set stages.";
    const troubled = agents.filter((agent) => problems(agent).length).length;
    const unknown = agents.filter((agent) => !agent.about).length;
    return [
      h("div.heading", h("h1", "Fleet"), h("span.muted", count(agents.length, "agent")),
        troubled ? badge(`${troubled} with problems`, "warn") : null, unknown ? badge(`${unknown} unknown`, "") : null,
        h("div.actions", guarded("New stage", () => openStage(null, app), { tone: "primary", reason }))),
      h("section", { key: "stages", "aria-labelledby": "stages" }, h("h2", { id: "stages" }, "Stages"),
        table({ caption: "Stages of the roll-out", rows: stages, rowKey: ({ stage }) => stage.nodes_filter, columns: stageColumns(app, reason), stacked: true,
          empty: "There are no stages: hosts with may_set_mode change no limits (shadow)." })),
      h("section", { key: "groups", "aria-labelledby": "groups" }, h("h2", { id: "groups" }, "By tag"),
        table({ caption: "Agents by tag", rows: groups(agents), rowKey: (group) => group.tag, columns: GROUP_COLUMNS, stacked: true, empty: "No node has a tag." })),
      bigTable("fleet", {
        caption: "Agents", noun: "agent", columns: chosenColumns("fleet", COLUMNS), tools: columnMenu("fleet", COLUMNS, app), rows: agents, rowKey: (agent) => agent.id, sort: "id", height: "60vh",
        searchable: (agent) => `${agent.id} ${agent.tags.join(" ")} ${agent.about ? `${agent.about.version} ${formatLevel(agent.about.level)}` : "unknown"} ${problems(agent).join(" ")}`,
        empty: "No node has registered yet: nodes register themselves when their agent runs.",
      }),
    ];
  },
};

export const formatLevel = (level) => (level === null ? "no stage" : ["guarantee", "weight", "quota"].includes(level) ? `reclaim by ${level}` : level);
const problems = (agent) => [...(agent.is_online ? [] : ["silent"]), ...(agent.about?.problems ?? [])];
const stageLevel = (agent) => (!agent.about ? "–" : agent.about.may_set_mode ? `${formatLevel(agent.told)}${agent.is_canary ? " (canary)" : ""}` : "may not");
const figure = (name) => (agent) => agent.about?.[name] ?? 0;

const stateOfAgent = (agent) => (!agent.is_online ? ["silent", "bad"] : agent.about?.is_paused ? ["paused", "warn"] : ["online", "good"]);

const COLUMNS = [
  { key: "id", width: 180, narrow: 130, title: "Node", value: (a) => a.id, cell: (a) => h("a", { href: to("nodes", a.id), title: a.id }, a.id) },
  { key: "state", shown: "always", width: 90, narrow: 78, title: "State", value: (a) => stateOfAgent(a)[0], cell: (a) => badge(...stateOfAgent(a)) },
  { key: "level", shown: "always", width: 150, narrow: 140, title: "Level", help: "The most that it does to any job's limit now", value: (a) => a.about?.level ?? "", cell: (a) => (a.about ? formatLevel(a.about.level) : "–") },
  { key: "told", shown: "wide", width: 210, title: "Set by stage", help: "The level that the stages set; it applies where the agent's configuration has may_set_mode", value: stageLevel },
  { key: "bound", shown: "wide", width: 150, title: "Allowed", help: "The most that its own configuration allows", value: (a) => a.about?.bound ?? "", cell: (a) => (a.about ? formatLevel(a.about.bound) : "–") },
  { key: "version", shown: "wide", width: 110, title: "Agent", value: (a) => a.about?.version ?? "", cell: (a) => (a.about ? h("span", { title: a.about.version }, a.about.version) : badge("unknown", "")) },
  { key: "problems", shown: "wide", width: 200, title: "Problems", value: (a) => problems(a).length, cell: (a) => h("span.long", { title: problems(a).join("; ") || null }, problems(a).join("; ") || "–") },
  { key: "errors", shown: "wide", width: 76, title: "Errors", align: "right", value: figure("errors") },
  { key: "foreign", shown: "wide", width: 130, title: "Foreign writes", help: "Limits that other programs changed, since the agent's start", align: "right", value: figure("foreign_writes") },
  { key: "late", shown: "wide", width: 116, title: "Late, core-s", help: "Time for which threads were throttled below what they could have used, since the agent's start", align: "right",
    value: figure("late_core_seconds"), cell: (a) => number(figure("late_core_seconds")(a)) },
  { key: "ticks", shown: "wide", width: 96, title: "Late ticks", align: "right", value: figure("late_ticks") },
  { key: "rule", shown: "wide", width: 110, title: "Rule", value: (a) => a.about?.limit_rule ?? "–" },
  { key: "tags", width: 160, title: "Tags", value: (a) => a.tags.join(", "), cell: (a) => h("span.long", { title: a.tags.join(", ") }, a.tags.join(", ") || "–") },
];

function groups(agents) {
  const found = new Map();
  for (const agent of agents) for (const tag of agent.tags) found.set(tag, found.get(tag) ?? []).get(tag).push(agent);
  return [...found].map(([tag, members]) => ({ tag, members })).sort((a, b) => b.members.length - a.members.length).slice(0, MAX_GROUPS);
}

function tally(members, of) {
  const counts = new Map();
  for (const member of members) counts.set(of(member), (counts.get(of(member)) ?? 0) + 1);
  return [...counts].sort().map(([name, many]) => `${many} ${name}`).join(", ");
}

const GROUP_COLUMNS = [
  { title: "Tag", cell: ({ tag }) => h("span.mono", tag) },
  { title: "Agents", align: "right", cell: ({ members }) => members.length },
  { title: "Levels", cell: ({ members }) => tally(members, (a) => (a.about ? formatLevel(a.about.level) : "unknown")) },
  { title: "Versions", cell: ({ members }) => tally(members, (a) => a.about?.version ?? "unknown") },
  { title: "With problems", align: "right", cell: ({ members }) => members.filter((a) => problems(a).length).length },
];

const formatNames = (names) => names.slice(0, MOST_NAMES).join(", ") + (names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : names.length ? "" : "no host");
// Fields that have their defaults are not sent.
const stateOf = ({ state, canaries = [] }) => (state === "canary" ? h("span", { title: canaries.join("\n") || null }, badge("canary", "warn"), `: ${formatNames(canaries)}`) : state === "stopped" ? badge("stopped", "bad") : badge("everywhere", "good"));
const seenOf = ({ stage, canary }) => (canary ? `${count(canary.checks, "check")}: ${number(canary.late_cores)} cores late, ${count(canary.foreign_writes, "foreign write")}, ${count(canary.errors, "error")}` : stage.stopped ?? stage.why ?? "");

const formatFilter = ({ nodes_filter: filter }) => (filter === EVERY_NODE ? "all nodes" : filter);

const stageColumns = (app, reason) => [
  { title: "Nodes", cell: ({ stage }) => h("span.mono", formatFilter(stage)) },
  { title: "Level", cell: ({ stage }) => formatLevel(stage.level) },
  { title: "Before", cell: ({ stage }) => formatLevel(stage.previous) },
  { title: "State", cell: ({ stage }) => stateOf(stage) },
  { title: "Hosts at level", align: "right", cell: (view) => `${view.reached} of ${view.host_count}` },
  { title: "By", cell: ({ stage }) => stage.user },
  { title: "Observed", cell: (view) => h("span.long", seenOf(view) || "–") },
  { title: h("span.hidden-text", "Actions"), cell: ({ stage }) => h("div.actions",
    stage.state === "canary" ? act("Advance", "advance", stage, "All nodes of the group follow the canaries.", app, reason) : null,
    stage.state === "stopped" ? null : act("Stop", "stop", stage, stage.previous === null ? "Its nodes follow other stages; without one they change no limits." : `Its nodes go back to ${formatLevel(stage.previous)}.`, app, reason),
    guarded("Change", () => openStage(stage, app), { reason })) },
];

const act = (label, verb, stage, text, app, reason) => guarded(label, () => {
  const form = new Form([["why", "Why", "shown to others and in the audit log", "text", ""]]);
  const work = () => send("POST", `/rollout/${verb}`, { nodes_filter: stage.nodes_filter, why: form.value("why") ?? "" }, { sentences: [text] });
  openForm(`${label} the stage of ${formatFilter(stage)}`, form, label, work, { before: h("p", text), done: (done, dialog) => finish(dialog, label, done, app) });
}, { reason });

// A change is made; what it says of hosts that do more now is to be read.
function finish(dialog, label, { warnings }, app) {
  app.reload();
  if (!warnings?.length) dialog.close();
  else openNotice(dialog, h("p", `${label}: done.`), warnings);
}

// First the plan is shown, then it can be applied. `stage`: the one that is changed, null for a new one.
function openStage(stage, app) {
  const { nodes_filter: filter = "", level = "weight", canary_period_s: period = null, budget: known = {} } = stage ?? {};
  let planned = null;
  const place = h("div");
  const form = new Form([
    ["nodes_filter", "Nodes", "a formula of tags, such as rack-a & !gpu; empty: all", "text", filter === EVERY_NODE ? "" : filter],
    ["level", "Level", "the most that the agents may do to limits", "select:shadow,up-only,guarantee,weight,quota", level],
    ["canary_ratio", "Canary", "the fraction of nodes that goes first; 1: all at once", "number", 0.1],
    ["canary_period_s", "Advance after, seconds", "empty: only by hand", "number", period],
    ["max_late_cores", "Maximum of late cores", "per host on average, in two consecutive checks", "number", known.max_late_cores ?? 0.05],
    ["max_foreign_writes", "Maximum of foreign writes", "in total", "number", known.max_foreign_writes ?? 0],
    ["max_errors", "Maximum of errors", "in total", "number", known.max_errors ?? 0],
    ["why", "Why", "shown to others and in the audit log", "text", ""],
  ], () => { planned = null; apply.disabled = true; morph(place, h("div")); });
  const look = h("button", { type: "submit", form: FORM }, "Show what it changes");
  const apply = h("button.primary", { type: "button", disabled: true, onclick: () => carryOut() }, "Apply");
  const element = h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); plan(); } }, form.element, form.general, place);
  const dialog = openDialog(stage ? `Change the stage of ${formatFilter(stage)}` : "New stage", element, [look, apply]);

  function read() {
    const budget = { check_period_s: known.check_period_s, ...form.given(["max_late_cores", "max_foreign_writes", "max_errors"]) };
    return { nodes_filter: form.value("nodes_filter") ?? "", level: form.value("level"), budget, why: form.value("why") ?? "", ...form.given(["canary_ratio", "canary_period_s"]) };
  }

  async function plan() {
    form.clear();
    const body = read();
    const found = await during(dialog, form, () => send("POST", "/rollout/plan", body));
    if (found === null || JSON.stringify(read()) !== JSON.stringify(body)) return; // typed meanwhile
    planned = { body, found };
    morph(place, h("div", h("h3", "What it changes"), h("ul", found.sentences.map((sentence) => h("li", sentence)))));
    apply.disabled = false;
  }

  async function carryOut() {
    if (planned === null) return;
    const done = await during(dialog, form, () => send("POST", "/rollout", planned.body, planned.found));
    if (done !== null) finish(dialog, "Apply", done, app);
  }
}
