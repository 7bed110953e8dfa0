// The frame around the pages: shows the page of the URL, polls the server, and says when it does not answer.

import { watchTips } from "./tips.js";
import { link, request, Refusal, session, signIn, signOut } from "./api.js";
import { h, morph, openDialog, skeleton } from "./dom.js";
import { duration, localTimes, time, zone } from "./format.js";
import { parse, setQuery, takeToken } from "./route.js";

export const PERIOD_MS = 2000;
const STALE_MS = 6000;
const FOLLOW_MS = 5000;
const ME_MS = 30000;
const REFUSED_MS = 60000; // each refusal is in the audit log
const THEMES = ["auto", "light", "dark"];

// A page: {
//   load(params, {signal, query}): a promise of its data, asked for every PERIOD_MS while the page can be seen,
//   view(data, params, app): its element (pure; `app.redraw()` draws again without loading, `app.reload()` loads now, `app.ask(changes)` changes the query first),
//   title(params, data): text, period: other ms than PERIOD_MS }
// start({name, pages: [[["operations", ":id"], page], ...], menu: [[text, hash, first part of the path]], health, me})
// A part that begins with ":" is a name; a last one of "*name" takes the rest of the path.
export function start(options) {
  const app = new App(options);
  app.run();
  return app;
}

class App {
  constructor(options) {
    this.options = options;
    this.generation = 0;
    this.data = undefined;
    this.error = null;
    this.asking = null;
    this.health = null;
    this.me = null;
    this.meAsked = { at: -Infinity, of: null };
    this.offered = "";
    this.local = {};
  }

  run() {
    this.frame = h("div.frame",
      h("a.skip", { href: "#main", onclick: (event) => { event.preventDefault(); this.main.focus(); } }, "Skip to content"),
      h("header.top"), h("main", { id: "main", tabindex: "-1" }), h("p.hidden-text", { role: "status" }));
    document.body.append(this.frame);
    this.main = this.frame.querySelector("main");
    this.voice = this.frame.lastChild;
    this.shown = skeleton();
    this.main.append(this.shown);
    applyTheme();
    window.addEventListener("hashchange", () => this.go());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.reload(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
    // What was chosen in another tab.
    window.addEventListener("storage", ({ key }) => {
      if (key === "cpumond-session") this.beSomebodyElse();
      applyTheme();
      window.dispatchEvent(new Event("lineschange"));
      this.redraw();
    });
    window.addEventListener("beforeprint", () => applyTheme("light"));
    window.addEventListener("afterprint", () => applyTheme());
    watchTips();
    setInterval(() => { this.probe(); this.drawFrame(); }, 1000);
    this.drawFrame();
    this.go();
  }

  // The part of the URL after the # has changed.
  go() {
    const given = takeToken();
    if (given) this.offer(given);
    const { parts } = parse();
    const where = JSON.stringify(parts);
    if (where === this.where) {
      this.redraw();
      this.reload();
      return;
    }
    // Where the focus was when another page was chosen; null for the first page, which leaves the focus alone.
    this.leaving = this.where === undefined ? null : document.activeElement;
    this.where = where;
    // Dialogs of the page before do not stay open over this one.
    closeDialogs();
    this.isMenuOpen = false;
    this.isAsked = false;
    this.generation += 1;
    this.asking?.abort();
    clearTimeout(this.timer);
    this.data = undefined;
    this.error = null;
    this.local = {};
    [this.page, this.params] = this.find(parts);
    this.redraw();
    this.drawFrame();
    window.scrollTo(0, 0);
    this.load();
  }

  find(parts) {
    for (const [pattern, page] of this.options.pages) {
      const isOpen = pattern.at(-1)?.startsWith("*");
      if (isOpen ? parts.length < pattern.length : parts.length !== pattern.length) continue;
      const params = {};
      const fits = pattern.every((wanted, index) => {
        if (wanted.startsWith(":")) params[wanted.slice(1)] = parts[index];
        else if (wanted.startsWith("*")) params[wanted.slice(1)] = parts.slice(index).join("/");
        else return wanted === parts[index];
        return true;
      });
      if (fits) return [page, params];
    }
    return [{ load: async () => null, view: () => [h("h1", "There is no such page"), h("p", h("a", { href: "#/" }, this.options.menu[0][0]))], title: () => "Not found" }, {}];
  }

  async load() {
    const { generation, page, params } = this;
    const begun = Date.now();
    this.asking = new AbortController();
    try {
      const data = await page.load(params, { signal: this.asking.signal, query: parse().query });
      if (generation !== this.generation) return;
      this.data = data;
      this.error = null;
      this.isAsked = false;
    } catch (error) {
      if (generation !== this.generation || error.name === "AbortError") return;
      if (!(error instanceof Refusal)) console.error(error);
      this.error = error;
      if (error.status === 401) {
        // Without a token nothing is shown; a token dialog that the user closed is not opened again.
        this.data = undefined;
        if (!this.isAsked) this.askToken();
        this.isAsked = true;
      }
    }
    try {
      this.redraw();
      this.drawFrame();
      // The page is drawn before this answer comes.
      if (this.options.health) this.health = await this.options.health().catch(() => this.health);
      if (this.options.me && this.error?.status !== 401) await this.askWho();
      if (generation === this.generation) this.drawFrame();
    } finally {
      // Polling goes on after an error in drawing.
      if (generation === this.generation) {
        clearTimeout(this.timer);
        const period = this.error?.status === 403 ? REFUSED_MS : page.period ?? PERIOD_MS;
        if (!document.hidden) this.timer = setTimeout(() => this.load(), Math.max(period - (Date.now() - begun), 200));
      }
    }
  }

  // Loads now and not at the next period: after a change, or when the window is visible again.
  reload() {
    this.asking?.abort();
    clearTimeout(this.timer);
    this.generation += 1;
    return this.load();
  }

  // Changes parts of the URL's query, and asks for what the page shows with them.
  ask(changes) {
    setQuery(changes);
    this.redraw();
    return this.reload();
  }

  redraw() {
    const { page, params, data } = this;
    let wanted;
    try {
      wanted = this.draw();
    } catch (error) {
      wanted = this.drawBroken(error);
    }
    // The heading can have the focus when its page is opened.
    wanted.querySelector("h1")?.setAttribute("tabindex", "-1");
    try {
      this.shown = morph(this.shown, wanted);
    } catch (error) {
      // The page may be half drawn: all of it is replaced.
      this.shown = this.drawBroken(error);
      this.main.replaceChildren(this.shown);
    }
    this.arrive();
    const title = page.title?.(params, data) ?? "";
    document.title = title ? `${title} – ${this.options.name}` : this.options.name;
  }

  draw() {
    const { page, params, data, error } = this;
    if (data !== undefined) {
      const refused = error && error.status !== 0 && error.status !== 401;
      return h("div.page", { key: this.where }, refused ? complain(error) : null, page.view(data, params, this));
    }
    if (error?.status === 401) return h("div.page", { key: this.where }, h("p", "You need a token to see this. "), h("button", { type: "button", onclick: () => this.askToken() }, "Enter a token"));
    if (error) return h("div.page", { key: this.where }, h("h1", page.title?.(params) || this.options.name), complain(error));
    return skeleton({ key: this.where });
  }

  // An answer that cannot be drawn, perhaps from a node of another version: the page says so and asks again.
  drawBroken(error) {
    if (!this.local.isBroken) console.error(error);
    this.local.isBroken = true;
    return h("div.page", { key: `broken ${this.where}` }, h("h1", this.options.name),
      complain(new Error("This page could not read the server's response and tries again. Are the scheduler and the agents of different versions?")));
  }

  // Moves the focus to the heading of a page that was just opened, unless the user has moved it meanwhile.
  arrive() {
    const heading = this.shown.querySelector("h1");
    if (!this.leaving || !heading) return;
    if ([this.leaving, document.body, null].includes(document.activeElement)) heading.focus({ preventScroll: true });
    this.leaving = null;
  }

  // Has a screen reader say a text: once for each thing that was asked for, not each time that its answer changes.
  announce(asked, text) {
    if (this.local.announced !== undefined && this.local.announced !== asked) this.voice.textContent = text;
    this.local.announced = asked;
  }

  // Who the server takes the user for: seldom, and anew in another session.
  async askWho() {
    const { at, of } = this.meAsked;
    if (of === session() && Date.now() - at < ME_MS) return;
    this.meAsked = { at: Date.now(), of: session() };
    this.me = await this.options.me().catch(() => null);
  }

  // A server that hangs differs from a question that takes long: it does not answer this one either.
  async probe() {
    if (this.isProbing || !this.options.health || !link.waitingSince || Date.now() - link.waitingSince < PERIOD_MS) return;
    this.isProbing = true;
    this.health = await this.options.health().catch(() => this.health);
    this.isProbing = false;
  }

  drawFrame() {
    const first = parse().parts[0] ?? "";
    const old = (from) => Date.now() - from > STALE_MS;
    const failing = (link.waitingSince !== null && old(link.waitingSince)) || (link.failingSince !== null && old(link.lastAt || link.failingSince));
    const stuck = !failing && this.health?.status === "stuck";
    // Hidden from screen readers, which would say it each second.
    const silent = (text) => h("span", { "aria-hidden": "true" }, text);
    const since = link.lastAt || link.failingSince || link.waitingSince;
    const text = failing ? [`No answer since ${time((since + link.offsetMs) / 1000)}`, silent(` (${duration((Date.now() - since) / 1000)})`),
      `: this page is out of date; ${link.problem || "the server does not answer"}.`]
      : stuck ? ["The scheduler responds, but has stopped computing shares", silent(` (since ${duration(this.health.last_update_age_s)})`), ": shares are old."] : null;
    const standby = !failing && link.standby;
    const leader = standby ? addressOf(standby.leader) : null;
    if (leader?.isNear && Date.now() - standby.since > FOLLOW_MS) location.replace(leader.href);
    const header = this.frame.querySelector("header.top");
    morph(header, h("header.top", { class: this.isMenuOpen ? "open" : null },
      h("a.brand", { href: "#/" }, this.options.name),
      h("nav", { "aria-label": "Pages" }, this.options.menu.map(([name, hash, part]) =>
        h("a", { href: hash, "aria-current": [].concat(part).includes(first) ? "page" : null }, name))),
      h("span.live", { class: failing || stuck || standby ? "bad" : "good" },
        failing ? "stale" : stuck ? "stuck" : standby ? "standby" : "live"),
      h("span.muted.zone", { title: "The time zone of all times on these pages: that of this browser" }, h("span.hidden-text", "Times: "), zone()),
      this.me?.user && this.error?.status !== 401 ? drawWho(this.me, first) : null,
      this.options.find ? h("button.plain.find", { type: "button", title: "Ctrl-K", "aria-keyshortcuts": "Control+K Meta+K", onclick: this.options.find }, "Find") : null,
      // Seen in narrow windows only, where all but the name, the state and "Find" is behind it.
      h("button.plain.unfold", { type: "button", "aria-expanded": String(Boolean(this.isMenuOpen)), onclick: () => { this.isMenuOpen = !this.isMenuOpen; this.drawFrame(); } }, "☰ Menu"),
      session() ? h("button.plain", { type: "button", onclick: () => { signOut(); this.beSomebodyElse(); } }, "Sign out") : null,
      drawTheme(() => this.drawFrame()),
      h("div.stale-wrap", { role: "status" }, text ? h("p.stale", text) : standby ? h("p.stale", describeStandby(standby, leader)) : null)));
  }

  // Somebody signed in or out, here or in another tab.
  beSomebodyElse() {
    closeDialogs();
    this.data = undefined;
    this.isAsked = false;
    this.redraw();
    return this.reload();
  }

  // Signs in with a token and returns whether that was possible; `problem` shows why it was not.
  async enter(token, problem) {
    try {
      await signIn(token);
    } catch (error) {
      problem.textContent = error.message;
      return false;
    }
    this.beSomebodyElse();
    return true;
  }

  // A link may be somebody else's, who would see what is done with its token: it signs nobody in without a question.
  async offer(token) {
    this.offered = token;
    let user;
    let refusal = "";
    try {
      ({ user } = await request("GET", "/api/v1/me", undefined, { token }));
    } catch (error) {
      refusal = error.message;
    }
    if (this.offered !== token) return;
    closeDialogs();
    this.offered = "";
    if (refusal) return this.askToken(refusal);
    const problem = h("p.error", { role: "alert" });
    const dialog = openDialog("Sign in",
      [h("p", "Sign in as ", h("strong", user), " with the token of this link?"),
        h("p.muted", "Only if the link is yours: the person who gave it to you can use the token, too."), problem],
      [h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button.primary", { type: "button", onclick: () => this.enter(token, problem) }, "Sign in")]);
  }

  askToken(refusal = "") {
    if (this.offered || document.querySelector("dialog[open]")) return;
    const input = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
    const problem = h("p.error", { role: "alert" }, refusal);
    const form = h("form", { onsubmit: async (event) => {
      event.preventDefault();
      if (!await this.enter(input.value.trim(), problem)) input.focus();
    } }, h("p", "This scheduler requires a token. It signs you in, in all tabs, until you sign out or close the browser."),
      h("label", { for: "token" }, "Token"), input, problem, h("button.primary", { type: "submit" }, "Sign in"));
    openDialog("Token", form, []);
    input.focus();
  }
}

function closeDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
}

const drawWho = ({ user, groups = [], is_admin: isAdmin }, first) => h("a.who", { href: "#/tokens", title: "You, and your tokens", "aria-current": first === "tokens" ? "page" : null },
  h("strong", user), groups.length ? h("span.muted", ` ${groups.join(", ")}`) : null, isAdmin ? [" ", h("span.badge", "administrator")] : null);

// Where the scheduler is that a standby names, {href, isNear: whether this browser is sure to reach it}; null where its
// address is that of its own loopback. A page that came over the loopback may have come through a tunnel.
function addressOf(leader) {
  const host = /^(\[[0-9a-f:.]+\]|[a-z0-9._-]+):[0-9]{1,5}$/i.exec(leader)?.[1];
  const isLocal = (name) => /^(localhost|127\.[0-9.]+|\[::1\])$/i.test(name);
  if (!host || (isLocal(host) && !isLocal(location.hostname))) return null;
  return { href: `${location.protocol}//${leader}/${location.hash}`, isNear: isLocal(host) === isLocal(location.hostname) };
}

function describeStandby(standby, leader) {
  if (!standby.leader) return "This scheduler is a standby, and there is no leader at the moment; this page tries again by itself.";
  return ["This scheduler is a standby; the leader is ", leader ? h("a", { href: leader.href }, standby.leader) : standby.leader,
    leader?.isNear ? ". Its page opens in a moment." : "."];
}

const complain = (error) => h("p.error", { role: "alert" }, localTimes(error.message) || "This page failed; see the browser's console.");

const chosenTheme = () => localStorage.getItem("cpumond-theme") ?? "auto";

function applyTheme(theme = chosenTheme()) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
  window.dispatchEvent(new Event("themechange"));
}

function drawTheme(redraw) {
  const theme = chosenTheme();
  const next = () => {
    localStorage.setItem("cpumond-theme", THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
    applyTheme();
    redraw();
  };
  return h("button.plain", { type: "button", onclick: next, "aria-label": `Theme: ${theme}`, title: "The colours of the page" }, h("span.wide", "Theme: "), theme);
}
