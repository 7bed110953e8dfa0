// What a user can do: make and change pools, start, suspend and abort operations, hold a job's limit.
// Nothing is checked here: the scheduler checks, and its sentence is shown beside the field that it is about.

import { path, query, Refusal, send } from "./api.js";
import { h, morph, openDialog } from "./dom.js";
import { cores } from "./format.js";
import { table } from "./table.js";
import { to } from "./route.js";

const ROOT = "<Root>";
const FORM = "action"; // the id of the form in a dialog, of which there is one at a time

// [path of the option, label, hint, kind]; kind: number, text, select:a,b, flag
const POOL_FIELDS = [
  [["weight"], "Weight", "how much it counts among its siblings; empty: the default, 1", "number"],
  [["mode"], "Mode", "fair_share: operations share; fifo: one after the other", "select:fair_share,fifo"],
  [["strong_guarantee_resources", "cpu"], "Guaranteed cores", "strong_guarantee_resources/cpu", "number"],
  [["strong_guarantee_resources", "memory"], "Guaranteed memory, bytes", "strong_guarantee_resources/memory", "number"],
  [["resource_limits", "cpu"], "Limit, cores", "resource_limits/cpu", "number"],
  [["resource_limits", "memory"], "Limit of memory, bytes", "resource_limits/memory", "number"],
  [["max_share_ratio"], "Largest share, 0 to 1", "max_share_ratio", "number"],
  [["max_running_operation_count"], "Running operations at most", "max_running_operation_count", "number"],
  [["max_operation_count"], "Operations at most", "max_operation_count: with those that wait", "number"],
  [["integral_guarantees", "guarantee_type"], "Integral guarantee", "none, burst or relaxed", "select:none,burst,relaxed"],
  [["integral_guarantees", "resource_flow", "cpu"], "Flow, cores", "integral_guarantees/resource_flow/cpu", "number"],
  [["integral_guarantees", "burst_guarantee_resources", "cpu"], "Burst, cores", "integral_guarantees/burst_guarantee_resources/cpu", "number"],
  [["forbid_immediate_operations"], "No operations of its own", "forbid_immediate_operations", "flag"],
  [["create_ephemeral_subpools"], "A sub-pool for each user", "create_ephemeral_subpools", "flag"],
];

// --- forms -----------------------------------------------------------------------------------------------------------

class Form {
  // fields: [key, label, hint, kind, value]; the key is the option's path with slashes.
  constructor(fields, onchange) {
    this.inputs = new Map();
    this.errors = new Map();
    this.general = h("p.error", { role: "alert" });
    this.element = h("div.fields", fields.map(([key, label, hint, kind, value]) => {
      const id = `field-${key.replaceAll("/", "-")}`;
      const shared = { id, name: key, "aria-describedby": `${id}-hint ${id}-error`, oninput: onchange };
      const input = makeInput(kind, value, shared);
      const error = h("span.error", { id: `${id}-error`, role: "alert" });
      this.inputs.set(key, [input, kind]);
      this.errors.set(key, error);
      return h("div.field", { class: kind === "lines" ? "wide" : "" }, h("label", { for: id }, label), input,
        h("span.hint", { id: `${id}-hint` }, hint), error);
    }));
  }

  // The value of a field: null when it is empty; text that is no number is sent as it is, and the scheduler refuses it.
  value(key) {
    const [input, kind] = this.inputs.get(key);
    if (kind === "flag") return input.checked;
    const text = kind === "lines" ? input.value : input.value.trim();
    if (text === "") return null;
    if (kind !== "number") return text;
    const number = Number(text);
    return Number.isFinite(number) ? number : text;
  }

  clear() {
    this.general.textContent = "";
    for (const [key, [input]] of this.inputs) {
      input.removeAttribute("aria-invalid");
      this.errors.get(key).textContent = "";
    }
  }

  // Shows a refusal beside the field that it is about, or below all fields.
  refuse(message, field) {
    this.clear();
    const key = this.find(message, field);
    if (key === null) {
      this.general.textContent = message;
      return;
    }
    const [input] = this.inputs.get(key);
    input.setAttribute("aria-invalid", "true");
    this.errors.get(key).textContent = message;
    input.focus();
  }

  find(message, field) {
    const keys = [...this.inputs.keys()];
    for (const wanted of [field, ...(message.match(/[a-z_]+(?:\/[a-z_]+)*/g) ?? [])]) {
      if (!wanted) continue;
      const exact = keys.find((key) => key === wanted) ?? keys.find((key) => key.startsWith(`${wanted}/`))
        ?? keys.find((key) => wanted.startsWith(`${key}/`) || wanted.endsWith(`/${key}`));
      if (exact !== undefined) return exact;
    }
    return null;
  }
}

function makeInput(kind, value, shared) {
  if (kind === "flag") return h("input", { type: "checkbox", checked: value === true, ...shared });
  if (kind === "lines") return h("textarea", { value: value ?? "", spellcheck: "false", ...shared });
  if (kind.startsWith("select:")) {
    const options = kind.slice(7).split(",");
    return h("select", { ...shared, value: value ?? options[0] }, options.map((name) => h("option", { value: name }, name)));
  }
  const isNumber = kind === "number";
  return h("input", { type: "text", inputmode: isNumber ? "decimal" : null, autocomplete: "off", value: value === null || value === undefined ? "" : String(value), ...shared });
}

function at(attributes, where) {
  return where.reduce((value, name) => value?.[name] ?? value?.[name.replaceAll("_", "-")], attributes) ?? null;
}

const keyOf = (where) => where.join("/");

function readJson(text, what) {
  if (!text) return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Refusal(422, { error: `${what} is not JSON: ${error.message}` });
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Refusal(422, { error: `${what} must be a JSON object, such as {"weight": 2}` });
  }
  return value;
}

// Runs `work` with all buttons disabled; a refusal is shown in the form.
async function during(dialog, form, work) {
  const buttons = [...dialog.querySelectorAll("button")].filter((button) => !button.disabled);
  const focused = document.activeElement;
  for (const button of buttons) button.disabled = true;
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    form.refuse(error.message, error.attributes.field);
    return null;
  } finally {
    for (const button of buttons) button.disabled = false;
    // A disabled button loses the focus.
    if (dialog.open && [document.body, dialog, focused].includes(document.activeElement)) focused.focus();
  }
}

// Shows the warnings of a change that was made, in place of the form.
function tell(dialog, sentence, warnings, button) {
  dialog.querySelector(".dialog-body").replaceChildren(h("div", { role: "alert" }, h("p", sentence), warnings.map((each) => h("p.note", each))));
  dialog.querySelector("footer").replaceChildren(button);
  button.focus();
}

// --- pools -----------------------------------------------------------------------------------------------------------

export function poolsActions(tree, app) {
  return [h("button.primary", { type: "button", onclick: () => openPoolForm(tree, null, ROOT, app) }, "New pool")];
}

// `pool` is a PoolView.
export function poolActions(tree, pool, app) {
  if (pool.is_ephemeral) return [];
  const isRoot = pool.parent === null;
  return [
    isRoot ? null : h("button", { type: "button", onclick: () => openPoolForm(tree, pool, pool.parent, app) }, "Change"),
    h("button", { type: "button", onclick: () => openPoolForm(tree, null, pool.name, app) }, "New sub-pool"),
    isRoot ? null : h("button.danger", { type: "button", onclick: () => openRemoval(tree, pool, app) }, "Remove"),
  ];
}

function openPoolForm(tree, pool, parent, app) {
  const isNew = pool === null;
  const attributes = pool?.attributes ?? {};
  const before = new Map(POOL_FIELDS.map(([where,, , kind]) => [keyOf(where), at(attributes, where) ?? (kind === "flag" ? false : null)]));
  const names = isNew
    ? [["name", "Name", "letters, digits, - _ :", "text", ""], ["parent", "Parent", "the pool above; <Root> is the top", "text", parent]]
    : [];
  const fields = [...names, ...POOL_FIELDS.map(([where, label, hint, kind]) => [keyOf(where), label, hint, kind, before.get(keyOf(where))])];
  let planned = null;
  const planPlace = h("div");
  const form = new Form(fields, () => { planned = null; apply.disabled = true; morph(planPlace, h("div")); });
  const others = new Form([["others", "Other options, as JSON", 'for example {"fifo_sort_parameters": ["weight"]}; null removes one', "lines", ""]],
    () => { planned = null; apply.disabled = true; });
  const look = h("button", { type: "submit", form: FORM }, "Show what it changes");
  const apply = h("button.primary", { type: "button", disabled: true, "aria-describedby": "first-look", onclick: () => carryOut() }, isNew ? "Create" : "Apply");
  const first = h("span.muted.first-look", { id: "first-look" }, `First see what it changes, then ${isNew ? "create it" : "apply it"}.`);
  const element = h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); plan(); } }, form.element, others.element, form.general, others.general, planPlace);
  const dialog = openDialog(isNew ? `New pool in tree ${tree}` : `Change pool ${pool.name}`, element, [first, look, apply]);

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

  async function plan() {
    form.clear();
    others.clear();
    await during(dialog, form, async () => {
      const command = read();
      if (command.type === "ChangePool" && !command.edits.length) throw new Refusal(422, { error: "nothing is changed yet" });
      if (command.type === "CreatePool" && !command.name) throw new Refusal(422, { error: "name: a pool needs a name", attributes: { field: "name" } });
      const answer = await send("POST", "/plan", command);
      if (!answer.accepted) throw new Refusal(422, { error: answer.refusal, attributes: answer.attributes ?? { field: answer.field } });
      // The plan does not have what was typed while its answer was on the way.
      if (JSON.stringify(read()) !== JSON.stringify(command)) throw new Refusal(422, { error: "this changed meanwhile; look at what it changes again" });
      morph(planPlace, h("div", drawPlan(answer)));
      planned = command;
    });
    apply.disabled = planned === null;
    if (!planned) return;
    planPlace.scrollIntoView({ block: "nearest" });
    apply.focus();
  }

  async function carryOut() {
    if (!planned) return;
    const command = planned;
    const done = await during(dialog, form, () => (command.type === "ChangePool"
      ? send("PATCH", path`/trees/${tree}/pools/${pool.name}`, { edits: command.edits })
      : send("POST", path`/trees/${tree}/pools`, { name: command.name, parent: command.parent, attributes: command.attributes })));
    if (done === null) return;
    dialog.close();
    if (isNew) location.hash = to("pools", tree, command.name);
    app.reload();
  }
}


// Shows at once what the removal changes; its button is enabled once the scheduler has answered for the present choice.
function openRemoval(tree, pool, app) {
  const form = new Form([["recursive", "With all pools below", "operations in them go to ephemeral pools of the same name", "flag", false]], () => plan());
  const planPlace = h("div");
  const go = h("button.danger", { type: "button", disabled: true, onclick: async () => {
    const done = await during(dialog, form, () => send("DELETE", path`/trees/${tree}/pools/${pool.name}` + query({ recursive: String(form.value("recursive")) }), undefined));
    if (done === null) return;
    dialog.close();
    location.hash = to("pools", tree);
  } }, "Remove");
  const dialog = openDialog(`Remove pool ${pool.name}`, h("div", h("p", "Its guarantees and limits end at once."), form.element, form.general, planPlace), [go]);
  let asked = 0;
  plan();

  async function plan() {
    const number = asked += 1;
    go.disabled = true;
    form.clear();
    morph(planPlace, h("div"));
    const command = { type: "RemovePool", tree, pool: pool.name, recursive: form.value("recursive") };
    const answer = await during(dialog, form, () => send("POST", "/plan", command));
    if (number !== asked) return;
    if (answer?.accepted) morph(planPlace, h("div", drawPlan(answer)));
    else if (answer) form.refuse(answer.refusal, null);
    go.disabled = false;
  }
}

// What a change does, for whom (an answer of /plan).
export function drawPlan(plan) {
  const moved = plan.effects.filter((effect) => effect.changed.length);
  return [
    h("h3", "What it changes"),
    [...plan.warnings, ...plan.notes].map((sentence) => h("p.note", sentence)),
    plan.changes.length ? null : h("p.muted", "No option gets another value."),
    moved.length ? table({
      caption: "Shares before and after",
      rows: moved.slice(0, 100),
      rowKey: (effect) => `${effect.kind}/${effect.name}`,
      columns: [
        { title: "who", cell: (effect) => h("span", effect.kind === "operation" ? `operation ${effect.title || effect.name}` : effect.name) },
        { title: "cores before", align: "right", cell: (effect) => share(effect.before) },
        { title: "cores after", align: "right", cell: (effect) => share(effect.after) },
        { title: "what changes", cell: (effect) => (effect.changed.includes("exists") ? (effect.before ? "gone" : "new") : effect.changed.join(", ").replaceAll("_", " ")) },
      ],
    }) : h("p.muted", "Nobody's share changes now."),
    moved.length > 100 ? h("p.muted", `and ${moved.length - 100} more`) : null,
  ];
}

const share = (outlook) => (outlook ? cores(outlook.fair_share.cpu) : "–");

// --- operations ------------------------------------------------------------------------------------------------------

export function operationsActions(app, pool = "") {
  return [h("button.primary", { type: "button", onclick: () => openStart(app, pool) }, "Start an operation")];
}

function openStart(app, pool) {
  const form = new Form([
    ["pool", "Pool", "empty: a pool of your name", "text", pool],
    ["title", "Title", "to find it again", "text", ""],
    ["command", "Command", "for a shell, run by each job", "lines", ""],
    ["job_count", "Jobs", "how many are to be completed", "number", 1],
    ["cpu_limit", "Cores of each job", "what it orders", "number", 1],
    ["memory_limit", "Memory of each job, bytes", "empty: 0", "number", ""],
    ["enable_cpu_reclaim", "Give away what it does not use", "enable_cpu_reclaim of job-cpu-monitor; back at once when it wakes up", "flag", true],
    ["min_cpu_limit", "Never below, cores", "min_cpu_limit of job-cpu-monitor; empty: the node's, else 1", "number", ""],
    ["others", "More of the specification, as JSON", 'for example {"weight": 2, "max_failed_job_count": 1}', "lines", ""],
  ], () => {});
  const go = h("button.primary", { type: "submit", form: FORM }, "Start");
  const dialog = openDialog("Start an operation", h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); start(); } }, form.element, form.general), [go]);

  async function start() {
    form.clear();
    const done = await during(dialog, form, () => {
      const spec = { ...readJson(form.value("others"), "the specification") };
      for (const key of ["pool", "title"]) if (form.value(key) !== null) spec[key] = form.value(key);
      const task = {};
      for (const key of ["command", "job_count", "cpu_limit", "memory_limit"]) if (form.value(key) !== null) task[key] = form.value(key);
      spec.tasks ??= { main: task };
      const monitor = { enable_cpu_reclaim: form.value("enable_cpu_reclaim") };
      if (form.value("min_cpu_limit") !== null) monitor.min_cpu_limit = form.value("min_cpu_limit");
      spec.job_cpu_monitor ??= monitor;
      return send("POST", "/operations", { spec });
    });
    if (done === null) return;
    const go = () => {
      dialog.close();
      location.hash = to("operations", done.id);
    };
    if (!done.warnings.length) go();
    else tell(dialog, "The operation is started. Is this what you meant?", done.warnings, h("button.primary", { type: "button", onclick: go }, "Show it"));
  }
}

// `operation` is an OperationDetails.
export function operationActions(operation, app) {
  if (!["pending", "running"].includes(operation.state)) return [];
  const act = (label, does, options = {}) => h("button", { type: "button", class: options.danger ? "danger" : "", onclick: () => openAct(operation, label, does, options, app) }, label);
  return [
    operation.suspended
      ? act("Resume", "resume", { text: "Its jobs are started again." })
      : act("Suspend", "suspend", { text: "No more jobs of it are started.", fields: [["abort_running_jobs", "Stop its running jobs, too", "they are started anew when it is resumed", "flag", false]] }),
    act("Complete", "complete", { text: "It ends as completed; its jobs are stopped." }),
    act("Abort", "abort", { danger: true, text: "It ends, and its jobs are stopped.", fields: [["message", "Why", "kept as its error; may be empty", "text", ""]] }),
  ];
}

function openAct(operation, label, does, { text, fields = [], danger }, app) {
  const form = new Form(fields, () => {});
  const go = h("button", { type: "submit", form: FORM, class: danger ? "danger" : "primary" }, label);
  const dialog = openDialog(`${label} ${operation.title || operation.id}`,
    h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); act(); } }, h("p", text), form.element, form.general), [go]);

  async function act() {
    const body = Object.fromEntries(fields.map(([key]) => [key, form.value(key) ?? ""]));
    const done = await during(dialog, form, () => send("POST", path`/operations/${operation.id}` + `/${does}`, fields.length ? body : undefined));
    if (done === null) return;
    dialog.close();
    app.reload();
  }
}

// `job` is a JobView; `isHeld`: its limit is pinned, overridden or contested, so the monitor does not move it.
export function jobActions(operation, job, app, isHeld = false) {
  if (job.state !== "running") return [];
  const where = path`/operations/${job.operation_id}/jobs/${job.id}`;
  return [
    h("button", { type: "button", onclick: () => openPin(where, job, app) }, "Pin"),
    isHeld ? h("button", { type: "button", onclick: () => openUnpin(where, app) }, "Unpin") : null,
  ];
}

function openPin(where, job, app) {
  const form = new Form([
    ["cpu_limit", "Cores", `the limit is held there; at most ${cores(job.cpu_limit)}, empty: all it ordered`, "number", ""],
    ["ttl_s", "For how many seconds", "empty: until it is unpinned", "number", 3600],
  ], () => {});
  const go = h("button.primary", { type: "submit", form: FORM }, "Pin");
  const dialog = openDialog("Hold this job's limit", h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); pin(); } },
    h("p", "The monitor leaves the limit alone meanwhile. The job's node carries it out with its next heartbeat."), form.element, form.general), [go]);

  async function pin() {
    const done = await during(dialog, form, () => send("POST", `${where}/pin`, { cpu_limit: form.value("cpu_limit"), ttl_s: form.value("ttl_s") }));
    if (done === null) return;
    dialog.close();
    app.reload();
  }
}

function openUnpin(where, app) {
  const form = new Form([], () => {});
  const go = h("button.primary", { type: "button", onclick: async () => {
    if (await during(dialog, form, () => send("POST", `${where}/unpin`, undefined)) === null) return;
    dialog.close();
    app.reload();
  } }, "Unpin");
  const dialog = openDialog("Unpin this job", h("div", h("p", "The monitor moves its limit again."), form.general), [go]);
}
