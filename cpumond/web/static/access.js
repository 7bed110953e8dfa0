// The access list of a pool or a tree: who may do what with it and below it, and how that is changed.

import { path, send } from "./api.js";
import { h } from "./dom.js";
import { Form, openForm } from "./forms.js";
import { guarded, ROOT } from "./rights.js";
import { badge, facts, table } from "./table.js";

const PERMISSIONS = ["read", "use", "modify_children", "write", "administer", "manage", "read_secrets"];
const MODES = { object_and_descendants: "here and below", object_only: "here alone", descendants_only: "below alone" };

const modeOf = (entry) => entry.inheritance_mode ?? "object_and_descendants";

// `holder`: a PoolView, or a TreeView for the root pool.
export function accessSection(holder, tree, pool, app) {
  const { acl, inherit_acl: inherits = true, owner, acl_required: isRequired = false } = holder.attributes;
  const isTree = pool === ROOT;
  const own = acl ?? [];
  const inherited = (holder.inherited_acl ?? []).map(({ where, entry }) => ({ entry, from: where }));
  const rows = [...own.map((entry) => ({ entry, from: "" })), ...inherited];
  return h("section.card", { key: "access", "aria-labelledby": "access-title" },
    h("div.heading", h("h2", { id: "access-title" }, "Who may do what"),
      h("div.actions", guarded("Change the access list", () => openAccess(holder, tree, pool, app), { reason: holder.may?.administer }))),
    facts([
      ["Owner", owner || "none"],
      isTree ? ["Where no access list applies", isRequired ? "only administrators (acl_required)" : "every holder of a token may do everything"]
        : ["Entries from above", inherits ? "also apply here" : "do not apply here (inherit_acl is off)"],
    ]),
    table({
      caption: "Access list", rows, rowKey: (row) => JSON.stringify(row), stacked: true, empty: "There are no entries, here or above.",
      columns: [
        { title: "", cell: ({ entry }) => badge(entry.action, entry.action === "deny" ? "bad" : "good") },
        { title: "Who", cell: ({ entry }) => entry.subjects.join(", ") },
        { title: "What", cell: ({ entry }) => entry.permissions.join(", ") },
        { title: "Where", cell: ({ entry }) => MODES[modeOf(entry)] ?? modeOf(entry) },
        { title: "From", cell: ({ from }) => from || h("span.muted", "this list") },
      ],
    }));
}

// Entries are changed, added and removed, and kept together by one button.
function openAccess(holder, tree, pool, app) {
  const isTree = pool === ROOT;
  const { attributes } = holder;
  const switches = new Form([
    isTree ? ["acl_required", "Deny access without an entry", "acl_required: where no access list applies, only administrators may act", "flag", attributes.acl_required === true]
      : ["inherit_acl", "Also apply the entries from above", "inherit_acl", "flag", attributes.inherit_acl !== false],
    ["owner", "Owner", "the user that the subject “owner” stands for", "text", attributes.owner ?? ""],
  ]);
  let entries = (attributes.acl ?? []).map(makeEntry);
  const place = h("div.entries");
  const add = h("button", { type: "button", onclick: () => { entries.push(makeEntry({ action: "allow", subjects: [], permissions: ["use"] })); draw(); place.lastChild.querySelector("select").focus(); } }, "Add an entry");
  const list = { inputs: switches.inputs, element: [switches.element, place, add], general: switches.general, clear, refuse };
  openForm(isTree ? `Access list of the tree ${tree}` : `Access list of pool ${pool}`, list, "Save", save, { app });
  draw();

  function draw() {
    place.replaceChildren(...entries.map((form, index) => h("fieldset.card", h("legend", `Entry ${index + 1}`), form.element,
      h("button.plain", { type: "button", onclick: () => { entries = entries.filter((each) => each !== form); draw(); add.focus(); } }, "Remove this entry"))));
    if (!entries.length) place.append(h("p.muted.flat", "No entry."));
  }

  // A refusal of "acl/0/subjects" is shown in the first entry.
  function refuse(message, field) {
    const [, index, name = "subjects"] = /^acl\/(\d+)(?:\/(\w+))?/.exec(field ?? "") ?? [];
    const form = entries[index];
    if (form) form.refuse(message, form.key(name));
    else switches.refuse(message, field);
  }

  function clear() {
    for (const form of [switches, ...entries]) form.clear();
  }

  function save() {
    const readEntry = (form) => Object.fromEntries(["action", "subjects", "permissions", "inheritance_mode"].map((name) => [name, form.value(form.key(name))]));
    const value = (name) => [{ path: [name], value: switches.value(name) }];
    const edits = [...value(isTree ? "acl_required" : "inherit_acl"), ...value("owner"), { path: ["acl"], value: entries.map(readEntry) }];
    return send("PATCH", isTree ? path`/trees/${tree}` : path`/trees/${tree}/pools/${pool}`, { edits });
  }
}

let made = 0; // so that each field has an id of its own

function makeEntry(entry) {
  const key = (name) => `entry-${made}/${name}`;
  made += 1;
  const form = new Form([
    [key("action"), "Action", "deny takes precedence", "select:allow,deny", entry.action],
    [key("subjects"), "Who", "users and groups; everyone, owner", "names", entry.subjects],
    [key("inheritance_mode"), "Where", "object_only: not in the pools below; descendants_only: only there", `select:${Object.keys(MODES).join(",")}`, modeOf(entry)],
    [key("permissions"), "What", "administer includes all others", `checks:${PERMISSIONS.join(",")}`, entry.permissions],
  ]);
  form.key = key;
  return form;
}
