// What can be done with a node: no new jobs, no jobs at all, or jobs again; what that does is shown first.

import { get, path, send } from "./api.js";
import { h, morph } from "./dom.js";
import { cores, count, duration } from "./format.js";
import { during, Form, openForm } from "./forms.js";
import { guarded, mayOn, ROOT } from "./rights.js";
import { operationLink, table } from "./table.js";
import { simulator } from "./what_if.js";

const WHY = ["why", "Why", "for others, and for the audit log; may be empty", "text", ""];
const ACTS = {
  cordon: { label: "Cordon", text: "It gets no new jobs; those that it has run on.", fields: [WHY] },
  drain: { label: "Drain", text: "It gets no new jobs, and those that it has are stopped, interruptible ones first; they start again where there is room.", tone: "danger",
    fields: [WHY, ["graceful", "Gracefully", "jobs get job_graceful_preemption_timeout, not job_preemption_timeout", "flag", false]] },
  uncordon: { label: "Uncordon", text: "Jobs are started on it again.", fields: [WHY] },
};

// `node` is a NodeDetails, `rights` what readRights() gave.
export function nodeActions(node, app, rights) {
  if ((node.lost_at ?? null) !== null) return [];
  const reason = node.tree === null ? (app.me?.is_admin === false ? "It is in no tree: that takes an administrator." : "")
    : mayOn(rights, node.tree, ROOT, "administer") ? "" : `It takes administer on the tree ${node.tree}, which you do not have.`;
  const offered = node.cordon ? (node.cordon.drain ? ["uncordon"] : ["uncordon", "drain"]) : ["cordon", "drain"];
  return offered.map((does) => guarded(ACTS[does].label, () => openAct(does, node, app), { tone: ACTS[does].tone ?? "", reason }));
}

function openAct(does, node, app) {
  const { label, text, fields, tone } = ACTS[does];
  const where = path`/nodes/${node.id}`;
  const form = new Form(fields, () => {});
  const ahead = does === "uncordon" ? null : simulator(form, () => ({
    text: `${label} node ${node.id}`, question: { node: node.id, drain: does === "drain" },
  }));
  const plan = h("div", tellPlan(does, node));
  const body = () => Object.fromEntries(fields.map(([key]) => [key, form.value(key) ?? ""]));
  const dialog = openForm(`${label} node ${node.id}`, form, label, () => send("POST", `${where}/${does}`, body()),
    { app, tone, before: [h("p.flat", text), plan, ahead?.place], buttons: [ahead?.button], onclose: () => ahead?.stop() });
  if (does === "drain") showDrain();

  async function showDrain() {
    const found = await during(dialog, form, () => get(`${where}/drain`));
    if (found) morph(plan, h("div.part", drawDrain(found)));
  }
}

function tellPlan(does, node) {
  if (does === "drain") return [];
  const free = cores(Math.max(node.free.cpu ?? 0, 0));
  const jobs = node.job_count ? count(node.job_count, "job") : "No job";
  return h("p.note", does === "cordon" ? `${free} cores that are free now are given to nobody; ${jobs.toLowerCase()} of it ${node.job_count === 1 ? "runs" : "run"} on.` : `${free} cores that are free now can be given to jobs.`);
}

// An answer of /nodes/{node}/drain.
function drawDrain(plan) {
  if (!plan.job_count) return h("p.note", "It has no job that would be stopped.");
  return [
    h("p.note", `${count(plan.job_count, "job")} would be stopped, of which ${plan.waiting_job_count} would wait for room; ${cores(plan.lost_core_seconds / 3600)} core-hours of work would be lost.`,
      plan.gang_job_count ? ` ${count(plan.gang_job_count, "job")} on other nodes would stop with their gangs.` : null,
      plan.hidden_job_count ? ` ${count(plan.hidden_job_count, "job")} of operations that you may not see are not listed.` : null),
    plan.jobs.length ? table({ caption: "Jobs that a drain would stop", rows: plan.jobs, rowKey: (job) => job.job_id, columns: [
      { title: "Job", cell: (job) => h("span.mono", job.job_id) },
      { title: "Operation", cell: (job) => operationLink(job.operation_id, job.title) },
      { title: "Pool", cell: (job) => h("span.long", job.pool) },
      { title: "Cores", align: "right", cell: (job) => cores(job.cores) },
      { title: "Runs for", align: "right", cell: (job) => duration(job.running_s) },
      { title: "Interruptible", cell: (job) => (job.interruptible ? "yes" : "no") },
      { title: "Core-hours lost", align: "right", cell: (job) => cores(job.lost_core_seconds / 3600) },
      { title: "Goes to", cell: (job) => job.to_node || "waits for room" },
    ] }) : null,
  ];
}
