// Who the scheduler takes the user for, and tokens: the own ones, or all for an administrator.

import { get, path, send } from "./api.js";
import { h, openDialog } from "./dom.js";
import { during, Form, FORM } from "./forms.js";
import { time } from "./format.js";
import { badge, facts, table } from "./table.js";

export const tokens = {
  title: () => "Tokens",
  period: 10000,
  async load(_, { signal }) {
    const [me, list] = await Promise.all([get("/me", { signal }), get("/tokens", { signal })]);
    return { me, list: list.tokens };
  },
  view({ me, list }, _, app) {
    return [
      h("div.heading", h("h1", "Tokens"), h("div.actions", h("button.primary", { type: "button", onclick: () => openNew(me, app) }, "New token"))),
      h("section.card", { "aria-label": "You" }, facts([
        ["You are", me.user], ["Groups", (me.groups ?? []).join(", ") || "none"], ["Administrator", me.is_admin ? "yes: may do everything" : "no"],
      ])),
      table({ caption: "Tokens", rows: list, rowKey: (token) => token.id, empty: "None was made with this page or cpumond token create.", columns: columns(app) }),
    ];
  },
};

const columns = (app) => [
  { title: "Token", help: "The first digits of its hash", cell: (t) => h("span.mono", t.id) },
  { title: "User", cell: (t) => t.user },
  { title: "Role", cell: (t) => (t.pattern ? `${t.role} ${t.pattern}` : t.role) },
  { title: "Groups", cell: (t) => (t.groups ?? []).join(", ") || "–" },
  { title: "Made", cell: (t) => `${time(t.created_at)}${t.created_by && t.created_by !== t.user ? ` by ${t.created_by}` : ""}` },
  { title: "Expires", cell: (t) => (t.expires_at ? time(t.expires_at) : "never") },
  { title: "State", cell: (t) => badge(...stateOf(t)) },
  { title: "Note", cell: (t) => h("span.long", { title: t.note || null }, t.note || "–") },
  { title: h("span.hidden-text", "Revoke"), cell: (t) => (stateOf(t)[1] === "good"
    ? h("button.small", { type: "button", "aria-label": `Revoke token ${t.id}`, onclick: () => openRevoke(t, app) }, "Revoke") : "") },
];

function stateOf(token) {
  if (token.revoked_at) return [`revoked ${time(token.revoked_at)}`, "bad"];
  return token.expires_at && token.expires_at * 1000 < Date.now() ? ["expired", "warn"] : ["valid", "good"];
}

function openNew(me, app) {
  const form = new Form([
    ["user", "User", "whom the token is for", "text", me.user],
    ...(me.is_admin ? [["role", "Role", "what it is good for", "select:user,admin,node,proxy", "user"],
      ["pattern", "Nodes", "of a node's token: which node ids; empty: any", "text", ""]] : []),
    ["groups", "Groups", "with commas", "names", []],
    ["expires", "Expires after", "such as 90d or 12h; empty: never", "text", "90d"],
    ["note", "Note", "what it is for", "text", ""],
  ], () => {});
  const go = h("button.primary", { type: "submit", form: FORM }, "Create");
  const dialog = openDialog("New token", h("form", { id: FORM, onsubmit: (event) => { event.preventDefault(); create(); } }, form.element, form.general), [go]);

  async function create() {
    form.clear();
    const keys = [...form.inputs.keys()].filter((key) => form.value(key) !== null);
    const done = await during(dialog, form, () => send("POST", "/tokens", Object.fromEntries(keys.map((key) => [key, form.value(key)]))));
    if (done === null) return;
    const close = h("button.primary", { type: "button", onclick: () => dialog.close() }, "I have it");
    dialog.querySelector(".dialog-body").replaceChildren(h("p", "This is the token. It is shown only now, and kept nowhere: copy it."), h("code.secret", done.token));
    dialog.querySelector("footer").replaceChildren(close);
    close.focus();
    app.reload();
  }
}

function openRevoke(token, app) {
  const form = new Form([], () => {});
  const go = h("button.danger", { type: "button", onclick: async () => {
    if (await during(dialog, form, () => send("DELETE", path`/tokens/${token.id}`)) === null) return;
    dialog.close();
    app.reload();
  } }, "Revoke");
  const dialog = openDialog(`Revoke token ${token.id}`, h("div", h("p", `Whoever shows it is refused from now on. It is ${token.user}'s.`), form.general), [go]);
}
