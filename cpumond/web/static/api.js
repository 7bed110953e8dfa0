// Requests to the server that the page came from, and whether it answers.

const TOKEN = "cpumond-token";

export class Refusal extends Error {
  // The server's refusal: its sentence, the HTTP status (0: no answer), attributes (field: the option it is about).
  constructor(status, body) {
    super(body?.error ?? `the server answered ${status}`);
    this.status = status;
    this.attributes = body?.attributes ?? {};
  }
}

// `offsetMs`: how far the server's clock is ahead of the browser's. `standby`: another scheduler leads, {leader: its
// host:port or "", since}; null where this one does.
export const link = { lastAt: 0, failingSince: null, problem: "", offsetMs: 0, standby: null };

const SAME_CLOCK_MS = 2000;
const MAX_PLAN = 500; // characters of a header

// Seconds since 1970 by the server's clock, which all times of its answers are of.
export const serverNow = () => (Date.now() + link.offsetMs) / 1000;

const cache = new Map(); // path -> {etag, value}
const MAX_CACHED = 20;

export function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function setToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
  cache.clear();
}

// `isText`: a successful answer is text and not JSON, returned as {text, headers}. `plan`: the answer of /plan that the user
// saw before.
export async function request(method, path, body, { signal, timeout = 20000, isText = false, plan = null } = {}) {
  const headers = {};
  if (plan) headers["X-Cpumond-Plan"] = tellPlan(plan);
  if (token()) headers.Authorization = `Bearer ${token()}`;
  const kept = method === "GET" ? cache.get(path) : undefined;
  if (kept) headers["If-None-Match"] = kept.etag;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      signal: signal ? AbortSignal.any([signal, AbortSignal.timeout(timeout)]) : AbortSignal.timeout(timeout),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    link.failingSince ??= Date.now();
    link.problem = "the server does not answer";
    throw new Refusal(0, { error: "the server does not answer; this page tries again by itself" });
  }
  readClock(response.headers.get("Date"));
  if (response.status === 304 && kept) {
    answered();
    return kept.value;
  }
  let value = null;
  try {
    value = isText && response.ok ? { text: await response.text(), headers: response.headers } : await response.json();
  } catch {
    // The answer is cut off, or not JSON: the status says enough.
  }
  readRole(path, response, value?.error ?? "");
  if (response.status >= 500 && response.status !== 503 && response.status !== 504) {
    link.failingSince ??= Date.now();
    link.problem = value?.error ?? `the server answered ${response.status}`;
  } else answered();
  if (!response.ok || value === null) throw new Refusal(response.status, value);
  const etag = response.headers.get("ETag");
  if (method === "GET" && etag) {
    cache.delete(path);
    cache.set(path, { etag, value });
    if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  }
  return value;
}

// For the audit log, in the signs that a header may have.
function tellPlan({ changes, effects, warnings }) {
  const moved = effects.filter((effect) => effect.changed.length).map(({ kind, name }) => `${kind} ${name}`);
  const text = [`${changes.length} changed`, `shares of ${moved.join(", ") || "nobody"}`, ...warnings].join("; ");
  return text.slice(0, MAX_PLAN).replace(/[^ -~]/g, "?");
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
  link.failingSince = null;
  link.problem = "";
}

// path`/trees/${tree}/pools/${pool}`: names are encoded
export function path(parts, ...names) {
  return parts.reduce((text, part, index) => text + encodeURIComponent(names[index - 1]) + part);
}

export function query(values) {
  const chosen = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(chosen).toString();
  return text ? `?${text}` : "";
}

export const get = (where, options) => request("GET", `/api/v1${where}`, undefined, options);
export const send = (method, where, body, plan) => request(method, `/api/v1${where}`, body, { plan });
