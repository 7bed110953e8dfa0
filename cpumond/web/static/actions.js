// What a user can do: make and change pools, start, suspend and abort operations, hold a job's limit, drain nodes.

import { get, path, query, Refusal, send } from "./api.js";
import { h, morph, openDialog } from "./dom.js";
import { changeText } from "./events.js";
import { allAmounts, amounts, cores, count, duration, hasAny, NONE } from "./format.js";
import { during, Form, FORM, openForm, openNotice, readJson } from "./forms.js";
import { firstWith, guarded, mayOn, ROOT } from "./rights.js";
import { operationLink, table } from "./table.js";
import { to } from "./route.js";
import { simulator } from "./what_if.js";

// [path of the option, label, hint, kind as Form has it]
const POOL_FIELDS = [
  [["weight"], "Weight", "relative to its siblings; empty: the default, 1", "number"],
  [["mode"], "Mode", "fair_share: operations share; fifo: one after the other", "select:fair_share,fifo"],
  [["strong_guarantee_resources", "cpu"], "Guaranteed cores", "strong_guarantee_resources/cpu", "number"],
  [["strong_guarantee_resources", "memory"], "Guaranteed memory, bytes", "strong_guarantee_resources/memory", "number"],
  [["resource_limits", "cpu"], "Limit, cores", "resource_limits/cpu", "number"],
  [["resource_limits", "memory"], "Limit of memory, bytes", "resource_limits/memory", "number"],
  [["max_share_ratio"], "Maximum share, 0 to 1", "max_share_ratio", "number"],
  [["scheduling_tag_filter"], "Only on nodes with", "scheduling_tag_filter: a formula of tags, such as ssd & !old", "text"],
  [["max_running_operation_count"], "Maximum of running operations", "max_running_operation_count", "number"],
  [["max_operation_count"], "Maximum of operations", "max_operation_count: running and waiting", "number"],
  [["integral_guarantees", "guarantee_type"], "Integral guarantee", "none, burst or relaxed", "select:none,burst,relaxed"],
  [["integral_guarantees", "resource_flow", "cpu"], "Flow, cores", "integral_guarantees/resource_flow/cpu", "number"],
  [["integral_guarantees", "burst_guarantee_resources", "cpu"], "Burst, cores", "integral_guarantees/burst_guarantee_resources/cpu", "number"],
  [["budget", "core_hours"], "Budget, core-hours", "budget/core_hours: for each calendar month, or for budget/period", "number"],
  [["budget", "when_spent"], "When the budget is spent", "warn; leftover: only resources that no other pool wants; stop: no new jobs", "select:warn,leftover,stop"],
  [["forbid_immediate_operations"], "No operations of its own", "forbid_immediate_operations", "flag"],
  [["create_ephemeral_subpools"], "One sub-pool per user", "create_ephemeral_subpools", "flag"],
];

const at = (attributes, where) => (where.reduce((value, name) => value?.[name] ?? value?.[name.replaceAll("_", "-")], attributes) ?? null);

const keyOf = (where) => where.join("/");

// --- pools -----------------------------------------------------------------------------------------------------------

// `rights`: what readRights() gave.
export function poolsActions(tree, app, rights) {
  const parent = firstWith(rights[tree], "modify_children");
  return [guarded("New pool", () => openPoolForm(tree, null, parent, app),
    { tone: "primary", reason: parent === undefined ? `No access list lets you create pools in tree ${tree}: you need modify_children.` : "" })];
}

// `pool` is a PoolView. What a pool gets from its parent may be changed by those who may write the parent.
export function poolActions(tree, pool, app, rights) {
  if (pool.is_ephemeral) return [];
  const isRoot = pool.parent === null;
  const may = pool.may ?? {};
  const ofParent = (permission) => isRoot || mayOn(rights, tree, pool.parent, permission);
  const removal = may.write || (ofParent("modify_children") ? "" : `You need modify_children on ${pool.parent}.`);
  return [
    isRoot ? null : guarded("Change", () => openPoolForm(tree, pool, pool.parent, app),
      { reason: may.write && rights[tree] && ofParent("write") ? "" : may.write }),
    guarded("New sub-pool", () => openPoolForm(tree, null, pool.name, app), { reason: may.modify_children }),
    isRoot ? null : guarded("Remove", () => openRemoval(tree, pool, app), { tone: "danger", reason: removal }),
  ];
}

export function openPoolForm(tree, pool, parent, app) {
  const isNew = pool === null;
  const attributes = pool?.attributes ?? {};
  const before = new Map(POOL_FIELDS.map(([where,, , kind]) => [keyOf(where), at(attributes, where) ?? (kind === "flag" ? false : null)]));
  const names = isNew
    ? [["name", "Name", "letters, digits, - _ :", "text", "", true], ["parent", "Parent", "the pool above it; <Root> is the top", `pool:${tree}`, parent]]
    : [];
  const fields = [...names, ...POOL_FIELDS.map(([where, label, hint, kind]) => [keyOf(where), label, hint, kind, before.get(keyOf(where))])];
  let planned = null;
  const planPlace = h("div");
  const change = () => { planned = null; apply.disabled = true; morph(planPlace, h("div")); ahead.stop(); };
  const form = new Form(fields, change);
  const others = new Form([["others", "Other options, as JSON", 'for example {"fifo_sort_parameters": ["weight"]}; null removes one', "lines", ""]], change);
  const ahead = simulator(form, () => ({ text: isNew ? `new pool ${form.value("name")}` : `change of pool ${pool.name}`, question: { command: readWhole() } }));
  const look = h("button", { type: "submit", form: FORM }, "Show what it changes");
  const apply = h("button.primary", { type: "button", disabled: true, "aria-describedby": "first-look", onclick: () => carryOut() }, isNew ? "Create" : "Apply");
  const first = h("span.muted.first-look", { id: "first-look" }, `Preview the change first, then ${isNew ? "create the pool" : "apply it"}.`);
  const element = h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); plan(); } }, form.element, others.element, form.general, others.general, planPlace, ahead.place);
  const dialog = openDialog(isNew ? `New pool in tree ${tree}` : `Change pool ${pool.name}`, element, [first, ahead.button, look, apply], () => ahead.stop());

  function read() {
    const more = readJson(others.value("others"), "the other options");
    const changed = [];
    for (const [where, , , kind] of POOL_FIELDS) {
      const key = keyOf(where);
      const value = form.value(key);
      const old = before.get(key);
      const isDefault = old === null && kind.startsWith("select:") && value === kind.slice(7).split(",")[0];
      if (value !== old && !isDefault) changed.push([where, value]);
    }
    if (!isNew) {
      const edits = [...changed, ...Object.entries(more).map(([name, value]) => [[name], value])];
      return { type: "ChangePool", tree, pool: pool.name, edits: edits.map(([where, value]) => ({ path: where, value })) };
    }
    const nested = {};
    for (const [where, value] of changed) {
      let place = nested;
      for (const name of where.slice(0, -1)) place = place[name] ??= {};
      place[where[where.length - 1]] = value;
    }
    return { type: "CreatePool", tree, name: form.value("name") ?? "", parent: form.value("parent") ?? ROOT, attributes: { ...nested, ...more } };
  }

  function readWhole() {
    const command = read();
    if (command.type === "ChangePool" && !command.edits.length) throw new Refusal(422, { error: "nothing has been changed yet" });
    if (command.type === "CreatePool" && !command.name) throw new Refusal(422, { error: "name: a pool needs a name", attributes: { field: "name" } });
    return command;
  }

  async function plan() {
    form.clear();
    others.clear();
    await during(dialog, form, async () => {
      const command = readWhole();
      const answer = await send("POST", "/plan", command);
      if (!answer.accepted) throw new Refusal(422, { error: answer.refusal, attributes: answer.attributes ?? { field: answer.field } });
      // The plan does not have what was typed while its answer was on the way.
      if (JSON.stringify(read()) !== JSON.stringify(command)) throw new Refusal(422, { error: "the form changed meanwhile; preview the change again" });
      morph(planPlace, h("div", drawPlan(answer)));
      planned = { command, answer };
    });
    apply.disabled = planned === null;
    if (!planned) return;
    planPlace.scrollIntoView({ block: "nearest" });
    apply.focus();
  }

  async function carryOut() {
    if (!planned) return;
    const { command, answer } = planned;
    const done = await during(dialog, form, () => (command.type === "ChangePool"
      ? send("PATCH", path`/trees/${tree}/pools/${pool.name}`, { edits: command.edits }, answer)
      : send("POST", path`/trees/${tree}/pools`, { name: command.name, parent: command.parent, attributes: command.attributes }, answer)));
    if (done === null) return;
    dialog.close();
    if (isNew) location.hash = to("pools", tree, command.name);
    app.reload();
  }
}

function openRemoval(tree, pool, app) {
  const form = new Form([["recursive", "Also remove all pools below", "their operations move to ephemeral pools of the same names", "flag", false]], () => plan());
  const plan = openPlanned(`Remove pool ${pool.name}`, "Its guarantees and limits cease at once.", "Remove", form, {
    command: () => ({ type: "RemovePool", tree, pool: pool.name, recursive: form.value("recursive") }),
    carryOut: (shown) => send("DELETE", path`/trees/${tree}/pools/${pool.name}` + query({ recursive: String(form.value("recursive")) }), undefined, shown),
    done: () => { location.hash = to("pools", tree); },
  });
}

// `event`: a change of pools or trees that is taken back.
export function openUndo(event, app) {
  openPlanned(`Undo change ${event.number}`, event.text, "Undo", new Form([]), {
    command: () => ({ type: "UndoChange", number: event.number }),
    carryOut: (shown) => send("POST", path`/events/${event.number}` + "/undo", undefined, shown),
    done: () => app.reload(),
  });
}

// `command`: a change of a pool or a tree that a report advises.
export function openChange(command, text, app) {
  const where = path`/trees/${command.tree ?? command.name}`;
  const carryOut = {
    ChangePool: (shown) => send("PATCH", `${where}${path`/pools/${command.pool}`}`, { edits: command.edits }, shown),
    ChangeTree: (shown) => send("PATCH", where, { edits: command.edits }, shown),
    CreatePool: (shown) => send("POST", `${where}/pools`, { name: command.name, parent: command.parent, attributes: command.attributes }, shown),
  }[command.type];
  openPlanned(`Change ${command.pool ?? command.name ?? command.tree}`, text, "Apply", new Form([]), {
    command: () => command, carryOut, done: () => app.reload(),
  });
}

// Shows at once what the command changes; its button is enabled once the scheduler has answered for the present choice.
// Returns what asks again.
function openPlanned(title, text, label, form, { command, carryOut, done }) {
  const planPlace = h("div");
  let shown = null;
  const go = h("button.danger", { type: "button", disabled: true, onclick: async () => {
    if (await during(dialog, form, () => carryOut(shown)) === null) return;
    dialog.close();
    done();
  } }, label);
  const dialog = openDialog(title, h("div", h("p", text), form.element, form.general, planPlace), [go]);
  let asked = 0;
  plan();
  return plan;

  async function plan() {
    const number = asked += 1;
    go.disabled = true;
    shown = null;
    form.clear();
    morph(planPlace, h("div"));
    const answer = await during(dialog, form, () => send("POST", "/plan", command()));
    if (number !== asked) return;
    if (answer?.accepted) {
      shown = answer;
      morph(planPlace, h("div", drawPlan(answer)));
    } else if (answer) form.refuse(answer.refusal, null);
    go.disabled = false;
  }
}

const SHOWN = 100;

// What a change does, for whom (an answer of /plan).
export function drawPlan(plan) {
  const moved = plan.effects.filter((effect) => effect.changed.length);
  return [
    h("h3", "What it changes"),
    [...plan.warnings, ...plan.notes].map((sentence) => h("p.note", sentence)),
    plan.changes.length
      ? h("ul.changes", plan.changes.slice(0, SHOWN).map((change, index) => h("li", { key: index }, changeText(change))))
      : h("p.muted", "No option changes."),
    plan.changes.length > SHOWN ? h("p.muted", `and ${plan.changes.length - SHOWN} more`) : null,
    moved.length ? table({
      caption: "Shares before and after",
      rows: moved.slice(0, SHOWN),
      rowKey: (effect) => `${effect.kind}/${effect.name}`,
      columns: [
        { title: "who", cell: (effect) => h("span", effect.kind === "operation" ? `operation ${effect.title || effect.name}` : effect.name) },
        { title: "cores before", align: "right", cell: (effect) => share(effect.before) },
        { title: "cores after", align: "right", cell: (effect) => share(effect.after) },
        { title: "what changes", cell: (effect) => h("span", describeEffect(effect)) },
      ],
    }) : h("p.muted", "No share changes now."),
    moved.length > SHOWN ? h("p.muted", `and ${moved.length - SHOWN} more`) : null,
  ];
}

// All but the cores, as `cpumond pool plan` has it.
function describeEffect({ kind, before, after, changed }) {
  const parts = changed.includes("exists") ? [before ? "gone" : "new"] : [];
  const add = (name, show, ...fields) => {
    const [old, now] = [before, after].map((outlook) => (outlook && show(outlook)) || NONE);
    if (fields.some((field) => changed.includes(field)) && (old !== NONE || now !== NONE)) parts.push(`${name} ${old === now ? now : `${old} → ${now}`}`);
  };
  if (before && after && before.pool !== after.pool) parts.push(`pool ${before.pool} → ${after.pool}`);
  if (before && after && before.is_running !== after.is_running) parts.push(after.is_running ? "would run" : "would wait");
  add("guarantee", (outlook) => hasAny(outlook.strong_guarantee) && amounts(outlook.strong_guarantee), "strong_guarantee", "exists");
  add("limit", (outlook) => allAmounts(outlook.limits), "limits", "exists");
  if (kind === "pool") {
    add("running", (outlook) => `${outlook.running_operation_count} of at most ${outlook.max_running_operation_count}`, "running_operation_count", "max_running_operation_count");
    add("running and waiting", (outlook) => `${outlook.operation_count} of at most ${outlook.max_operation_count}`, "operation_count", "max_operation_count");
  }
  return parts.join("; ") || "fair share";
}

const share = (outlook) => (outlook ? cores(outlook.fair_share.cpu) : "–");

// --- operations ------------------------------------------------------------------------------------------------------

export function operationsActions(app, rights, pool = "") {
  const trees = Object.values(rights);
  const isAllowed = !trees.length || trees.some((pools) => firstWith(pools, "use") !== undefined);
  return [guarded("Start an operation", () => openStart(app, pool),
    { tone: "primary", reason: isAllowed ? "" : "No access list lets you start operations in any pool: you need use." })];
}

function openStart(app, pool) {
  const form = new Form([
    ["pool", "Pool", "empty: a pool with your name", "pool:", pool],
    ["title", "Title", "to find the operation by", "text", ""],
    ["command", "Command", "a shell command that each job runs", "lines", "", true],
    ["job_count", "Jobs", "number of jobs to complete", "number", 1, true],
    ["cpu_limit", "Cores per job", "what each job requests", "number", 1],
    ["memory_limit", "Memory per job, bytes", "empty: default_memory_limit of the tree", "number", ""],
    ["enable_cpu_reclaim", "Lend unused CPU to other jobs", "enable_cpu_reclaim of job-cpu-monitor; returned as soon as the job needs it", "flag", true],
    ["min_cpu_limit", "Minimum limit, cores", "min_cpu_limit of job-cpu-monitor; empty: the node's value, else 1", "number", ""],
    ["others", "Other options of the specification, as JSON", 'for example {"weight": 2, "max_failed_job_count": 1}', "lines", ""],
  ], () => ahead.stop());
  const ahead = simulator(form, () => ({ text: `start of ${form.value("title") ?? "an operation"}`, question: { spec: read() } }));
  openForm("Start an operation", form, "Start", async () => send("POST", "/operations", { spec: read() }),
    { done, after: ahead.place, buttons: [ahead.button], onclose: () => ahead.stop() });

  function read() {
    const spec = { ...readJson(form.value("others"), "the specification"), ...form.given(["pool", "title"]) };
    spec.tasks ??= { main: form.given(["command", "job_count", "cpu_limit", "memory_limit"]) };
    spec.job_cpu_monitor ??= form.given(["enable_cpu_reclaim", "min_cpu_limit"]);
    return spec;
  }

  function done({ id, warnings }, dialog) {
    const go = () => {
      dialog.close();
      location.hash = to("operations", id);
    };
    if (!warnings.length) go();
    else openNotice(dialog, h("p", "The operation has started. Is this what you meant?"), warnings, "Show it", go);
  }
}

// `operation` is an OperationDetails.
export function operationActions(operation, app) {
  if (!["pending", "running"].includes(operation.state)) return [];
  const act = (label, does, options = {}) => guarded(label, () => openAct(operation, label, does, options, app),
    { tone: options.danger ? "danger" : "", reason: operation.may?.manage });
  return [
    operation.suspended
      ? act("Resume", "resume", { text: "Its jobs start again." })
      : act("Suspend", "suspend", { text: "It starts no more jobs.", fields: [["abort_running_jobs", "Also stop its running jobs", "they start again when the operation is resumed", "flag", false]] }),
    act("Complete", "complete", { text: "It ends in state completed; its jobs are stopped." }),
    act("Abort", "abort", { danger: true, text: "It ends, and its jobs are stopped.", fields: [["message", "Why", "optional; stored as its error", "text", ""]] }),
  ];
}

function openAct(operation, label, does, { text, fields = [], danger }, app) {
  const form = new Form(fields);
  const body = () => Object.fromEntries(fields.map(([key]) => [key, form.value(key) ?? ""]));
  openForm(`${label} ${operation.title || operation.id}`, form, label,
    () => send("POST", path`/operations/${operation.id}` + `/${does}`, fields.length ? body() : undefined),
    { app, tone: danger ? "danger" : "primary", before: h("p", text) });
}

// `job` is a JobView; `may`: what the asker may do with its operation; `isHeld`: its limit is pinned, overridden or contested, so the monitor does not move it.
export function jobActions(may, job, app, isHeld = false) {
  if (job.state !== "running") return [];
  const where = path`/operations/${job.operation_id}/jobs/${job.id}`;
  return [
    guarded("Pin", () => openPin(where, job, app), { reason: may?.manage }),
    isHeld ? guarded("Unpin", () => openForm("Unpin this job", new Form([]), "Unpin", () => send("POST", `${where}/unpin`, undefined),
      { app, before: h("p", "The monitor moves its limit again.") }), { reason: may?.manage }) : null,
  ];
}

function openPin(where, job, app) {
  const form = new Form([
    ["cpu_limit", "Cores", `the limit stays there; at most ${cores(job.cpu_limit)}, empty: all that it requests`, "number", ""],
    ["ttl_s", "Duration, seconds", "empty: until it is unpinned", "number", 3600],
  ]);
  openForm("Pin this job's limit", form, "Pin", () => send("POST", `${where}/pin`, { cpu_limit: form.value("cpu_limit"), ttl_s: form.value("ttl_s") }),
    { app, before: h("p", "The monitor does not change the limit until then. The node applies it at its next heartbeat.") });
}

// --- nodes: no new jobs, no jobs at all, or jobs again; what that does is shown first ---------------------------------

const WHY = ["why", "Why", "optional; shown to others and in the audit log", "text", ""];
const NODE_ACTS = {
  cordon: { label: "Cordon", text: "It gets no new jobs; the jobs on it continue.", fields: [WHY] },
  drain: { label: "Drain", text: "It gets no new jobs, and the jobs on it are stopped, interruptible ones first; they start again on other nodes.", tone: "danger",
    fields: [WHY, ["graceful", "Gracefully", "jobs get job_graceful_preemption_timeout, not job_preemption_timeout", "flag", false]] },
  uncordon: { label: "Uncordon", text: "Jobs start on it again.", fields: [WHY] },
};

// `node` is a NodeDetails, `rights` what readRights() gave.
export function nodeActions(node, app, rights) {
  if ((node.lost_at ?? null) !== null) return [];
  const reason = node.tree === null ? (app.me?.is_admin === false ? "It is in no tree: only an administrator may do that." : "")
    : mayOn(rights, node.tree, ROOT, "administer") ? "" : `You need administer on tree ${node.tree}.`;
  const offered = node.cordon ? (node.cordon.drain ? ["uncordon"] : ["uncordon", "drain"]) : node.held_until ? ["uncordon", "cordon", "drain"] : ["cordon", "drain"];
  return offered.map((does) => guarded(NODE_ACTS[does].label, () => openNodeAct(does, node, app), { tone: NODE_ACTS[does].tone ?? "", reason }));
}

function openNodeAct(does, node, app) {
  const { label, text, fields, tone } = NODE_ACTS[does];
  const where = path`/nodes/${node.id}`;
  const form = new Form(fields);
  const ahead = does === "uncordon" ? null : simulator(form, () => ({
    text: `${label} node ${node.id}`, question: { node: node.id, drain: does === "drain" },
  }));
  const plan = h("div", describeNodePlan(does, node));
  const body = () => Object.fromEntries(fields.map(([key]) => [key, form.value(key) ?? ""]));
  const dialog = openForm(`${label} node ${node.id}`, form, label, () => send("POST", `${where}/${does}`, body()),
    { app, tone, before: [h("p.flat", text), plan, ahead?.place], buttons: [ahead?.button], onclose: () => ahead?.stop() });
  if (does === "drain") showDrain();

  async function showDrain() {
    const found = await during(dialog, form, () => get(`${where}/drain`));
    if (found) morph(plan, h("div.part", drawDrain(found)));
  }
}

function describeNodePlan(does, node) {
  if (does === "drain") return [];
  const free = cores(Math.max(node.free.cpu ?? 0, 0));
  const jobs = node.job_count ? count(node.job_count, "job") : "No job";
  return h("p.note", does === "cordon" ? `${free} cores that are free now stay idle; ${jobs.toLowerCase()} on it ${node.job_count === 1 ? "continues" : "continue"}.` : `${free} cores that are free now become available to jobs.`);
}

// An answer of /nodes/{node}/drain.
function drawDrain(plan) {
  if (!plan.job_count) return h("p.note", "It has no jobs to stop.");
  return [
    h("p.note", `${count(plan.job_count, "job")} would be stopped, of which ${plan.waiting_job_count} would have to wait for free resources; ${cores(plan.lost_core_seconds / 3600)} core-hours of work would be lost.`,
      plan.failing_job_count ? ` ${count(plan.failing_job_count, "job")} would fail their operations, because of fail_on_job_restart.` : null,
      plan.gang_job_count ? ` ${count(plan.gang_job_count, "job")} on other nodes would stop together with their gangs.` : null,
      plan.hidden_job_count ? ` ${count(plan.hidden_job_count, "job")} of operations that are hidden from you are not listed.` : null),
    plan.jobs.length ? table({ caption: "Jobs that a drain would stop", rows: plan.jobs, rowKey: (job) => job.job_id, columns: [
      { title: "Job", cell: (job) => h("span", { title: job.job_id }, job.job_id.split("-")[0]) },
      { title: "Operation", cell: (job) => operationLink(job.operation_id, job.title) },
      { title: "Pool", cell: (job) => h("span.long", job.pool) },
      { title: "Cores", align: "right", cell: (job) => cores(job.cores) },
      { title: "Running for", align: "right", cell: (job) => duration(job.running_s) },
      { title: "Interruptible", cell: (job) => (job.interruptible ? "yes" : "no") },
      { title: "Core-hours lost", align: "right", cell: (job) => cores(job.lost_core_seconds / 3600) },
      { title: "Goes to", cell: (job) => (job.fails_operation ? "fails its operation" : job.to_node || "waits for free resources") },
    ] }) : null,
  ];
}
