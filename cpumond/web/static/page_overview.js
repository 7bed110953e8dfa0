// The overview: nodes, CPU, each tree, and what needs attention.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { h } from "./dom.js";
import { eventsSection, readEvents } from "./events.js";
import { bytes, capital, cores, count, duration, evenly, evenPercents, NONE, number, time, withoutIds } from "./format.js";
import { axis, line, rangeButtons, readHistory } from "./history.js";
import { CHANGES, OF_NODES, readMarks } from "./marks.js";
import { readRights, ROOT } from "./rights.js";
import { to } from "./route.js";
import { badge, facts } from "./table.js";

const MAX_GRAPHS = 6;
const MANY_ALERTS = 5;
const SEVERITY = { error: ["error", "bad"], warning: ["warning", "warn"] };

export const overview = {
  async load(params, options) {
    const answer = await get("/overview", options);
    const [events, rights, marks, ...graphs] = await Promise.all([readEvents({}), readRights(), readMarks({}, [...OF_NODES, "preemption", CHANGES, "take_over"]), ...answer.trees.slice(0, MAX_GRAPHS).map((tree) =>
      readHistory({ kind: "pool", tree: tree.name, name: ROOT }))]);
    return { answer, graphs, events, rights, marks };
  },

  view({ answer, graphs, events, rights, marks }, params, app) {
    const { trees, alerts, status } = answer;
    return h("div.page",
      h("div.heading", h("h1", "Overview"), trees.length ? h("div.actions", rangeButtons(app)) : null),
      answer.why ? h("p.note", { key: "why" }, `${withoutIds(capital(answer.why))}. `, whyLink(answer)) : null,
      figures(answer),
      alertCard(alerts, trees, status.counts),
      trees.length ? trees.map((tree, index) => treeCard(tree, graphs[index], marksOf(tree, marks)))
        : h("p.note", "There is no pool tree yet. Make one with ", h("code", "cpumond tree create NAME"), "."),
      eventsSection(events, rights, app),
      aboutCard(status, answer.health, answer.history));
  },

  title: () => "Overview",
};

// To the causes: they stand on the page of the tree's root pool.
function whyLink({ trees, why }) {
  const tree = trees.find((each) => each.why === why);
  return tree ? h("a", { href: to("pools", tree.name, ROOT) }, "why") : null;
}

const sum = (trees, name) => trees.reduce((total, tree) => total + (tree[name] ?? 0), 0);

function figures({ trees, status }) {
  const { counts } = status;
  const capacity = sum(trees, "capacity_cores");
  const figure = (name, value, more, { href, help } = {}) => h("div.card", { key: name, title: help },
    h("div.figure-name", href ? h("a", { href }, name) : name), h("div.figure-number", value), more ? h("div.muted", more) : null);
  const ordered = sum(trees, "ordered_cores");
  const limit = sum(trees, "limit_cores");
  const used = sum(trees, "used_cores");
  const reclaimed = sum(trees, "reclaimed_cores");
  const [capacityText, orderedText, limitText, usedText, reclaimedText] = evenly([capacity, ordered, limit, used, reclaimed]).map((text) => h("span", text, h("small", " cores")));
  const [orderedPart, limitPart, usedPart] = evenPercents([ordered, limit, used].map((value) => value / capacity)).map((text) => (capacity > 0 ? `${text} of capacity` : ""));
  const offline = counts.nodes - counts.online_nodes;
  return h("div.cards.figures",
    figure("Nodes online", most(counts.online_nodes, counts.nodes), offline ? `${number(offline, 6)} silent` : counts.nodes ? "all of them" : "none yet", { href: to("nodes") }),
    figure("CPU capacity", capacityText, "of nodes online", { help: "cores of all nodes that are online" }),
    figure("CPU requested", orderedText, orderedPart, { help: "cores that the jobs request (cpu_limit)" }),
    figure("CPU limits", limitText, limitPart, { help: "sum of the current limits: the most that jobs may use now" }),
    figure("CPU used", usedText, usedPart, { help: "cores that the jobs use" }),
    figure("Reclaimed now", reclaimedText, ordered > 0 ? `${evenPercents([reclaimed / ordered])} of requests` : "", { help: "requests minus limits: CPU that idle jobs leave to others now" }),
    figure("Operations", h("span", number(counts.shown_states.running ?? 0, 6), h("small", " running")), describeOthers(counts.shown_states), { href: to("operations") }),
    figure("Jobs", number(counts.active_jobs, 6), counts.stopping_jobs ? `and ${number(counts.stopping_jobs, 6)} stopping` : "active"));
}

const describeOthers = ({ pending = 0, waiting = 0, "cannot start": never = 0 }) => `${number(pending + waiting, 6)} waiting${never ? `, ${number(never, 6)} cannot start` : ""}`;
const most = (value, all) => h("span", number(value, 6), h("small", ` of ${number(all, 6)}`));

function alertCard(alerts, trees, counts) {
  if (!alerts.length && !counts.nodes) {
    return h("p.note", { key: "alerts" }, "No node has registered yet, so no job can run: start an agent with ", h("code", "[scheduler] url"), " in its configuration.");
  }
  if (!alerts.length) return h("p.note", { key: "alerts" }, "No alerts.");
  return h("section.card", { key: "alerts", "aria-labelledby": "alerts-title" },
    h("h2", { id: "alerts-title" }, count(alerts.length, "alert")),
    h("ul.alerts", { tabindex: alerts.length > MANY_ALERTS ? "0" : null, "aria-labelledby": "alerts-title" }, alerts.map((alert, index) => {
      const [word, tone] = SEVERITY[alert.severity] ?? [alert.severity, ""];
      return h("li", { key: `${alert.code}/${alert.subject}/${index}` }, badge(word, tone), h("span", withoutIds(alert.message), " ", subjectLink(alert, trees)));
    })));
}

function subjectLink({ code, subject }, trees) {
  if (!subject) return null;
  if (trees.some((tree) => tree.name === subject)) return h("a", { href: to("pools", subject), "aria-label": `Pools of ${subject}` }, "pools");
  return code.startsWith("node_") ? h("a", { href: to("nodes", subject), "aria-label": `Node ${subject}` }, "node") : null;
}

// What is about no tree, as a take-over, is marked in all.
const marksOf = (tree, marks) => marks.filter((mark) => !mark.tree || mark.tree === tree.name);

function treeCard(tree, history, marks) {
  const id = `tree-${tree.name}`;
  return h("section.card", { key: id, "aria-labelledby": id },
    h("div.heading", h("h2", { id }, "Tree ", h("a", { href: to("pools", tree.name) }, tree.name)),
      tree.is_default ? badge("default") : null,
      tree.overcommitted_nodes ? badge(`${count(tree.overcommitted_nodes, "node")} overcommitted`, "warn") : null),
    h("p.muted.flat", h("a", { href: to("nodes", { tree: tree.name }) }, `${number(tree.online_node_count, 6)} of ${count(tree.node_count, "node")} online`), ", ",
      h("a", { href: to("pools", tree.name) }, count(tree.pool_count, "pool")), ", ",
      h("a", { href: to("operations", { tree: tree.name }) }, `${count(tree.running_operation_count, "operation")} running, ${number(tree.pending_operation_count, 6)} pending`), "."),
    h("div.tree-parts", ledger(tree), history ? chart(`graph-${tree.name}`, {
      title: "CPU of the tree, cores", ...axis(history, marks), format: cores, height: 190,
      series: [
        line(history, "used_cores", "used", "--c1", { fill: true }), line(history, "limit_cores", "limits", "--c2", { step: true }),
        line(history, "ordered_cores", "requested", "--c7", { dash: true }), line(history, "total_cores", "capacity", "--text", { width: 1 }),
      ],
    }) : h("p.muted", "Graphs are shown for the first trees; this tree's graph is on the page of its root pool.")));
}

// One bar: what the jobs ordered is used, or free within their limits, or reclaimed; the line is the tree's capacity.
function ledger(tree) {
  const { capacity_cores: capacity, ordered_cores: ordered, limit_cores: limit, used_cores: used, reclaimed_cores: reclaimed } = tree;
  const idle = Math.max(limit - used, 0);
  const whole = Math.max(capacity, used + idle + reclaimed, 1e-9);
  const width = (value) => ({ width: `${(100 * value / whole).toFixed(3)}%` });
  const amounts = [capacity, ordered, limit, used, idle, reclaimed, tree.demand_cores, tree.waiting_cores, tree.idle?.held_back];
  const [texts, parts] = [evenly(amounts), evenPercents(amounts.map((value) => value / capacity))];
  const row = (key, name, value, help, swatch) => h("tr", { key, title: help },
    h("th", { scope: "row" }, h("span.square", { class: swatch, "aria-hidden": "true" }), name),
    h("td", texts[amounts.indexOf(value)]), h("td.muted", capacity > 0 ? parts[amounts.indexOf(value)] : NONE));
  return h("div.ledger",
    h("div.stack", { "aria-hidden": "true" },
      h("span.used", { style: width(Math.min(used, whole)) }), h("span.idle", { style: width(idle) }), h("span.reclaimed", { style: width(reclaimed) }),
      h("span.edge", { style: { left: `${(100 * capacity / whole).toFixed(3)}%` } })),
    h("table", h("caption.hidden-text", `CPU of the tree ${tree.name}`),
      h("thead", h("tr", h("th", { scope: "col" }, "CPU"), h("th", { scope: "col" }, "cores"), h("th", { scope: "col" }, "of capacity"))),
      h("tbody",
        row("capacity", "capacity", capacity, "cores of the nodes online: the line in the bar", "edge"),
        row("ordered", "requested by jobs", ordered, "sum of the jobs' cpu_limit"),
        row("limit", "limits in force", limit, "the most that the jobs may use now"),
        row("used", "used", used, "usage of the jobs, as last reported by their nodes", "used"),
        row("idle", "allocated, not used", idle, "limits of the jobs minus their usage", "idle"),
        row("reclaimed", "reclaimed", reclaimed, "requested, not needed, and available to others now", "reclaimed"),
        row("demand", "demand", tree.demand_cores, "what all running operations would use if they could"),
        row("waiting", "waiting", tree.waiting_cores, "demand of operations that are not running"),
        tree.idle ? row("held", "idle while work waits", tree.idle.held_back, "idle although operations wait that could use it") : null)),
    capacity > 0 ? null : h("p.flat", "No node is online: nothing can run."));
}

function aboutCard(status, health, history) {
  const age = health?.last_update_age_s ?? status.last_update_age_s;
  return h("section.card", { key: "about", "aria-labelledby": "about-title" }, h("h2", { id: "about-title" }, "Scheduler"), facts([
    ["Version", status.version],
    ["Running for", duration(status.uptime_s)],
    ["Last update", h("span", health?.status && health.status !== "ok" ? badge(health.status, health.status === "stuck" ? "bad" : "warn") : null, " ",
      age === null || age === undefined ? "none yet" : `${duration(age)} ago, every ${duration(status.update_period_s)}`)],
    ["Preemptions since its start", h("a", { href: to("preemptions") }, number(Object.values(status.counts.preemptions).reduce((a, b) => a + b, 0), 9))],
    ["Ended operations stored", number(status.counts.finished_operations, 9)],
    history ? ["History", historyText(history)] : ["History", "turned off"],
    history && history.series !== undefined ? ["Series in the history", history.left_out
      ? h("span", number(history.series, 9), ", ", badge(`${number(history.left_out, 9)} not recorded`, "warn")) : number(history.series, 9)] : null,
  ]));
}

function historyText(history) {
  const since = history.since ? `, since ${time(history.since)}` : "";
  return `${bytes(history.bytes)} of at most ${bytes(history.max_bytes)}${since}`;
}
