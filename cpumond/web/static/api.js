// Requests to the server that the page came from, and whether it answers.

const SESSION = "cpumond-session";

export class Refusal extends Error {
  // The server's refusal: its sentence, the HTTP status (0: no answer), attributes (field: the option it is about).
  constructor(status, body) {
    super(body?.error ?? `the server answered ${status}`);
    this.status = status;
    this.attributes = body?.attributes ?? {};
  }
}

// `offsetMs`: how far the server's clock is ahead of the browser's. `standby`: another scheduler leads, {leader: its
// host:port or "", since}; null where this one does. `waitingSince`: so long requests wait and nothing was answered.
export const link = { lastAt: 0, failingSince: null, problem: "", offsetMs: 0, standby: null, waitingSince: null };
let waiting = 0;

const SAME_ORIGIN = { cache: "no-store", credentials: "same-origin" };
const SAME_CLOCK_MS = 2000;
const MAX_PLAN = 500; // characters of a header

// Seconds since 1970 by the server's clock, which all times of its answers are of.
export const serverNow = () => (Date.now() + link.offsetMs) / 1000;

const cache = new Map(); // path -> {etag, value, of: the session}
const MAX_CACHED = 20;

// This page's half of the session, the same in all tabs; "" without one. The other half is a cookie that no script can read,
// and only both together are the token, which is kept nowhere.
export const session = () => localStorage.getItem(SESSION) ?? "";

function keepSession(key) {
  if (key) localStorage.setItem(SESSION, key);
  else localStorage.removeItem(SESSION);
  cache.clear();
}

let ending = null; // the request that has the browser forget its cookie, which must not be the next one's

export async function signIn(token) {
  await ending;
  const { key } = await request("POST", "/api/v1/session", undefined, { token });
  keepSession(key);
}

// In all tabs, and also where the server does not answer: without this half the cookie is nothing.
export function signOut() {
  keepSession("");
  ending = request("DELETE", "/api/v1/session").catch(() => null);
}

// `isText`: a successful answer is text and not JSON, returned as {text, headers}. `plan`: the answer of /plan that the user
// saw before. `token`: asks as who has it, and not as who is signed in.
export async function request(...asked) {
  waiting += 1;
  link.waitingSince ??= Date.now();
  try {
    return await exchange(...asked);
  } finally {
    waiting -= 1;
    if (!waiting) link.waitingSince = null;
  }
}

async function exchange(method, path, body, { signal, timeout = 20000, isText = false, plan = null, token = "" } = {}) {
  const of = session();
  const headers = token ? { Authorization: `Bearer ${token}` } : authorization();
  if (plan) headers["X-Cpumond-Plan"] = describePlan(plan);
  const kept = method === "GET" ? cache.get(path) : undefined;
  if (kept?.of === of) headers["If-None-Match"] = kept.etag;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const ends = [signal, AbortSignal.timeout(timeout)].filter(Boolean);
    response = await fetch(path, { ...SAME_ORIGIN, method, headers, body: JSON.stringify(body), signal: AbortSignal.any(ends) });
  } catch (error) {
    if (signal?.aborted) throw error;
    fail("the server does not answer");
  }
  readClock(response.headers.get("Date"));
  if (response.status === 304 && kept) {
    answered();
    return kept.value;
  }
  let value = null;
  try {
    value = isText && response.ok ? { text: await response.text(), headers: response.headers } : await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    // Of a refusal the status says enough.
    if (response.ok) fail("the server's response is truncated or not JSON");
  }
  readRole(path, response, value?.error ?? "");
  if (response.status >= 500 && response.status !== 503 && response.status !== 504) {
    link.failingSince ??= Date.now();
    link.problem = value?.error ?? `the server answered ${response.status}`;
  } else answered();
  // It is over, unless another tab has begun a new one.
  if (response.status === 401 && !token && of === session()) keepSession("");
  if (!response.ok || value === null) throw new Refusal(response.status, value);
  const etag = response.headers.get("ETag");
  if (method === "GET" && etag) {
    cache.delete(path);
    cache.set(path, { etag, value, of });
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }
  return value;
}

function fail(problem) {
  link.failingSince ??= Date.now();
  link.problem = problem;
  throw new Refusal(0, { error: `${problem}; this page tries again by itself` });
}

const authorization = () => (session() ? { "X-Cpumond-Session": session() } : {});

// A question whose answer comes in lines of JSON: `take` has each as it comes. It is given up with `signal`.
export async function stream(where, body, take, signal) {
  let response;
  try {
    response = await fetch(`/api/v1${where}`, {
      ...SAME_ORIGIN, method: "POST", headers: { ...authorization(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
    if (response.ok) await readLines(response.body, take);
  } catch (error) {
    if (signal.aborted || error instanceof Refusal) throw error;
    throw new Refusal(0, { error: "the server no longer responds; try again" });
  }
  if (!response.ok) throw new Refusal(response.status, await response.json().catch(() => null));
}

async function readLines(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value = "", done } = await reader.read();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) take(JSON.parse(line));
    if (done) return;
  }
}

// For the audit log, in the signs that a header may have.
// `sentences`: of the plan of a stage, which is in words already.
function describePlan({ changes, effects, warnings, sentences }) {
  const moved = (effects ?? []).filter((effect) => effect.changed.length).map(({ kind, name }) => `${kind} ${name}`);
  return (sentences ?? [`${changes.length} changed`, `shares of ${moved.join(", ") || "nobody"}`, ...warnings]).join("; ").slice(0, MAX_PLAN).replace(/[^ -~]/g, "?");
}

// The Date header has whole seconds: half a second is added on average.
function readClock(text) {
  const offsetMs = Date.parse(text ?? "") + 500 - Date.now();
  if (Number.isFinite(offsetMs)) link.offsetMs = Math.abs(offsetMs) > SAME_CLOCK_MS ? offsetMs : 0;
}

// A standby answers 503 to all but what is about itself, and names the leader.
function readRole(path, response, error) {
  const leader = response.headers.get("X-Cpumond-Leader") ?? "";
  if (response.status === 503 && (leader || error.startsWith("standby"))) {
    if (link.standby?.leader !== leader) link.standby = { leader, since: Date.now() };
  } else if (path.startsWith("/api/")) link.standby = null;
}

function answered() {
  link.lastAt = Date.now();
  link.waitingSince = link.lastAt;
  link.failingSince = null;
  link.problem = "";
}

// path`/trees/${tree}/pools/${pool}`: names are encoded
export const path = (parts, ...names) => parts.reduce((text, part, index) => text + encodeURIComponent(names[index - 1]) + part);

export function query(values) {
  const text = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "")).toString();
  return text ? `?${text}` : "";
}

// What a page shows in place of an object that is not there: {missing: the server's sentence}; other errors stay errors.
export function orMissing(error) {
  if (error.status !== 404) throw error;
  return { missing: error.message };
}

export const get = (where, options) => request("GET", `/api/v1${where}`, undefined, options);
export const send = (method, where, body, plan) => request(method, `/api/v1${where}`, body, { plan });
