// What if: questions whose answer is a run ahead, and the last answer in full.

import { openPoolForm, operationsActions } from "./actions.js";
import { get, path } from "./api.js";
import { h, island, settle } from "./dom.js";
import { during, Form } from "./forms.js";
import { loadTrees, readRights } from "./rights.js";
import { to } from "./route.js";
import { drawSimulation, lastAnswer, simulator } from "./what_if.js";

const PERIOD_MS = 15000;

export const whatIf = {
  title: () => "What if",
  period: PERIOD_MS,
  load: async () => ({ rights: await readRights(), trees: await loadTrees() }),
  view: ({ rights, trees }, _, app) => [
    h("h1", "What if"),
    h("p.muted.plain-text", "Simulate a change before you make it: operations that would start or end at another time, jobs that would be stopped, shares that would move. Nothing changes until you apply it."),
    h("div.grid2", { key: "questions" },
      card("Start another operation", "Describe the operation, then choose Simulate.", h("div", operationsActions(app, rights))),
      card("Change a pool", "Choose a pool, change its options, then choose Simulate.", island(POOL, "pool", { app, rights, trees })),
      card("Try guarantees", "Drag the guarantees of all pools and watch their fair shares.", h("div", trees.trees.map(({ name }) => h("a.button", { key: name, href: to("guarantees", name) }, `Tree ${name}`)))),
      card("Take a node away", "The node gets no new jobs; optionally, its jobs are stopped as well.", island(NODE, "node", { app }))),
    lastAnswer() ? h("section.card", { key: "answer", "aria-labelledby": "answer" }, h("h2", { id: "answer" }, `Last simulation: ${lastAnswer().text}`), drawSimulation(lastAnswer().answer))
      : h("p.muted.flat", { key: "none" }, "Nothing has been simulated in this tab yet."),
  ],
};

const card = (title, text, content) => h("section.card", { key: title, "aria-label": title }, h("h2", title), h("p.muted.flat", text), content);

const POOL = {
  create(node, props) {
    const trees = props.trees.trees.map(({ name }) => name);
    const tree = props.trees.default_tree || trees[0] || "";
    const form = new Form([...(trees.length > 1 ? [["what-if/tree", "Tree", "", `select:${[tree, ...trees.filter((name) => name !== tree)].join(",")}`, tree]] : []),
      ["what-if/pool", "Pool", "its name or a part of it", "pool:", ""]]);
    const open = async () => {
      form.clear();
      const name = form.value("what-if/pool") ?? "";
      const chosen = trees.length > 1 ? form.value("what-if/tree") : tree;
      const found = await during(node, form, () => get(path`/trees/${chosen}/pools/${name}`));
      if (found?.may?.write) form.refuse(found.may.write);
      else if (found) openPoolForm(chosen, found, found.parent, node.props.app);
    };
    node.append(ask("which-pool", form, open, h("button.primary", { type: "submit", form: "which-pool" }, "Choose options")));
    settle(node.firstChild);
  },
};

const NODE = {
  create(node, { app }) {
    const form = new Form([["what-if/node", "Node", "its id or a part of it", "node", ""], ["what-if/drain", "Also stop its jobs", "drains the node; otherwise it is cordoned", "flag", false]], () => node.ahead.stop());
    node.ahead = simulator(form, () => ({
      text: `${form.value("what-if/drain") ? "Drain" : "Cordon"} node ${form.value("what-if/node") ?? ""}`, question: { node: form.value("what-if/node") ?? "", drain: form.value("what-if/drain") },
    }), { tone: "primary", ondone: () => app.redraw() });
    node.append(ask("which-node", form, () => node.ahead.button.click(), node.ahead.button), node.ahead.place);
    settle(node.firstChild);
  },
  destroy(node) { node.ahead.stop(); },
};

const ask = (id, form, act, button) => h("form", { id, onsubmit: (event) => { event.preventDefault(); act(); } }, form.element, form.general, h("div", button));
