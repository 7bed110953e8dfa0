// Runs ahead: what a change would do, with the progress and a button that ends it.

import { Refusal, stream, session } from "./api.js";
import { h, morph } from "./dom.js";
import { cores, duration, number, time, withoutIds } from "./format.js";
import { to } from "./route.js";
import { operationLink, table } from "./table.js";

const SHOWN = 100; // rows of a table
let last = null; // {text: what was asked, answer, of: the session}
// The last answer in this tab to who is signed in, for the page that has it whole; null for none.
export const lastAnswer = () => (last?.of === session() ? last : null);

// A button that asks what `read` returns, {text, question: a body of /simulate}, and the place of the answer. `stop` ends a
// run and empties the place: what it is about has changed. `read` may throw a Refusal; it is shown in `form`. `ondone` shows
// the answer, where it has another place.
export function simulator(form, read, { tone = "", ondone = null } = {}) {
  let place = h("div", { "aria-live": "polite" });
  let running = null;
  const show = (...content) => { place = morph(place, h("div", { "aria-live": "polite" }, content)); };
  const button = h("button", { type: "button", class: tone || null, title: "Simulates the cluster with and without the change; nothing is changed", onclick: run }, "Simulate");

  function stop() {
    running?.abort();
    running = null;
    show();
  }

  async function run() {
    stop();
    form.clear();
    const mine = new AbortController();
    try {
      const { text, question } = read();
      running = mine;
      let answer = null;
      let first = [];
      let wrong = "";
      show(progress(0, first, stop));
      place.scrollIntoView({ block: "nearest" });
      await stream("/simulate", question, (message) => {
        first = message.first ?? first;
        wrong = message.error ?? "";
        answer = message.answer ?? null;
        if (running === mine && !answer) show(progress(message.done ?? 0, first, stop));
      }, mine.signal);
      if (running !== mine) return;
      if (!answer) throw new Refusal(500, { error: `The simulation failed: ${wrong || "it ended without a result; see the scheduler's log"}` });
      last = { text, answer, of: session() };
      if (ondone) {
        show();
        ondone();
        return;
      }
      show(drawSimulation(answer), h("p.flat", { key: "page" }, h("a", { href: to("what-if") }, "Open on a page")));
      place.scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (mine.signal.aborted) return;
      show();
      if (!(error instanceof Refusal)) throw error;
      form.refuse(error.message, error.attributes.field);
    } finally {
      if (running === mine) running = null;
    }
  }

  return { button, stop, get place() { return place; } };
}

const progress = (done, first, stop) => h("div.part", { key: "progress" }, first.map((line, index) => h("p.muted.flat", { key: index }, line)),
  h("div.ahead", { key: "ahead" }, h("progress", { max: "1", value: done, "aria-label": "Simulation" }), h("span.muted", { "aria-hidden": "true" }, `${Math.round(100 * done)} %`),
    h("button", { type: "button", onclick: stop }, "Cancel")));

// An answer of /simulate. Operations that the asker may not read have no id.
export function drawSimulation(found) {
  const after = (at) => (at === null ? "–" : duration(Math.max(at - found.as_of, 0)));
  const right = (title, cell) => ({ title, align: "right", cell });
  const operation = (id, title) => (id ? operationLink(id, title) : "–");
  const titles = new Map(found.starts.map((each) => [each.operation_id, each.title]));
  const pool = (each) => h("a.long", { href: to("pools", each.tree, each.pool) }, each.pool);
  const part = (caption, rows, rowKey, columns) => (rows.length ? [h("h3", { key: `${caption} title` }, caption),
    table({ caption, rows: rows.slice(0, SHOWN), rowKey, columns }), more(rows.length - SHOWN)] : null);
  return h("div.part", { key: "answer" }, h("h3", { key: "title" }, "Result"),
    h("ul.why", { key: "lines" }, found.lines.map((line, index) => h("li", { key: index }, withoutIds(line)))),
    part("Operations that would start or end at another time", found.starts, (each) => each.operation_id, [
      { title: "Operation", cell: (each) => (each.operation_id === found.operation_id && !each.start_before ? h("strong", each.title || "the new operation") : operation(each.operation_id, each.title)) },
      { title: "Pool", cell: pool }, right("Starts in", (each) => after(each.start_before)), right("Would start in", (each) => after(each.start_after)),
      right("Ends in", (each) => after(each.end_before)), right("Would end in", (each) => after(each.end_after)),
    ]),
    part("Jobs that would be stopped", found.stops, (each) => `${each.job_id}/${each.at}`, [
      { title: "Operation", cell: (each) => operation(each.operation_id, titles.get(each.operation_id)) }, { title: "Pool", cell: pool }, right("After", (each) => after(each.at)),
      right("Core-hours lost", (each) => cores(each.lost_core_hours)), { title: "Why", cell: (each) => h("span.words", withoutIds(each.why) || "of an operation that is hidden from you") },
    ]),
    part("Pools: mean cores over the simulated time", found.shares, (each) => `${each.tree}/${each.pool}`, [
      { title: "Pool", cell: pool }, right("Fair share", (each) => cores(each.fair_share_before)), right("Would be", (each) => cores(each.fair_share_after)),
      right("Allocated", (each) => cores(each.used_before)), right("Would be", (each) => cores(each.used_after)),
    ]),
    found.left_out ? h("p.muted.flat", { key: "left out" }, `${found.left_out} more would start or end at another time.`) : null,
    h("p.muted.flat", { key: "as of" }, `Simulated from ${time(found.as_of)} to ${time(found.horizon)}. Nothing was changed.`));
}

const more = (count) => (count > 0 ? h("p.muted.flat", `and ${number(count, 9)} more`) : null);
