// Who the scheduler takes the user for, and tokens: the own ones, or all for an administrator.

import { get, path, send } from "./api.js";
import { h } from "./dom.js";
import { Form, openForm, openNotice } from "./forms.js";
import { time } from "./format.js";
import { guarded } from "./rights.js";
import { badge, facts, table } from "./table.js";

const DAY_S = 86400;

export const tokens = {
  title: () => "Tokens",
  period: 10000,
  async load(_, { signal }) {
    const [me, list] = await Promise.all([get("/me", { signal }), get("/tokens", { signal })]);
    return { me, list: list.tokens };
  },
  view: ({ me, list }, _, app) => [
    h("div.heading", h("h1", "Tokens"), h("div.actions", guarded("New token", () => openNew(me, app),
      { tone: "primary", reason: me.is_open ? "Every user of this host may do everything here: tokens can be created only where users are authenticated." : "" }))),
    h("section.card", { "aria-label": "You" }, facts([
      ["You are", me.user], ["Groups", (me.groups ?? []).join(", ") || "none"], ["Administrator", me.is_admin ? "yes: may do everything" : "no"],
    ])),
    table({ caption: "Tokens", rows: list, rowKey: (token) => token.id, empty: "There are no tokens. Create one here or with cpumond token create.", columns: columns(app) }),
  ],
};

const columns = (app) => [
  { title: "Token", help: "The first digits of its hash", cell: (t) => h("span.mono", t.id) },
  { title: "User", cell: (t) => t.user },
  { title: "Role", cell: (t) => (t.pattern ? `${t.role} ${t.pattern}` : t.role) },
  { title: "Groups", cell: (t) => (t.groups ?? []).join(", ") || "–" },
  { title: "Created", cell: (t) => (t.source === "file" ? "in tokens_file" : `${time(t.created_at)}${t.created_by === t.user ? "" : ` by ${t.created_by}`}`) },
  { title: "Expires", cell: (t) => (t.expires_at === null ? "never" : time(t.expires_at)) },
  { title: "State", cell: (t) => badge(...stateOf(t)) },
  { title: "Note", cell: (t) => h("span.long", { title: t.note || null }, t.note || "–") },
  { title: h("span.hidden-text", "Revoke"), cell: (t) => (t.source === "store" && t.revoked_at === null
    ? h("button.small", { type: "button", "aria-label": `Revoke token ${t.id}`, onclick: () => openRevoke(t, app) }, "Revoke") : "") },
];

function stateOf({ state, revoked_at: at, revoked_by: by, made_with: parent }) {
  if (state === "revoked") return [`revoked ${time(at)} by ${by}`, "bad"];
  return state === "orphaned" ? [`created with ${parent}, which is not valid`, "bad"] : [state, state === "valid" ? "good" : "warn"];
}

const openRevoke = (token, app) => openForm(`Revoke token ${token.id}`, new Form([]), "Revoke", () => send("DELETE", path`/tokens/${token.id}`),
  { app, tone: "danger", before: h("p", `Requests with this token of ${token.user} are refused from now on.`) });

function openNew(me, app) {
  const form = new Form([
    ["user", "User", "whom the token is for", "text", me.user],
    ...(me.is_admin ? [["role", "Role", "what it may be used for", "select:user,admin,node,proxy", "user"],
      ["pattern", "Nodes", "node ids that a node's token is for; empty: any", "text", ""]] : []),
    ["groups", "Groups", "separated by commas", "names", []],
    ["expires_s", "Expires after, days", "empty: never", "number", 90],
    ["note", "Note", "what it is for", "text", ""],
  ]);
  const create = () => {
    const body = form.given();
    if (typeof body.expires_s === "number") body.expires_s *= DAY_S;
    return send("POST", "/tokens", body);
  };
  openForm("New token", form, "Create", create, { done({ token, warnings }, dialog) {
    openNotice(dialog, [h("p", "This is the token. It is shown only once: copy it now."), h("code.token-shown", token)], warnings, "I have copied it");
    app.reload();
  } });
}
