// Numbers and times as people read them.

export const NONE = "–";
const DURATIONS = new Set(["check_period", "start_delay", "restore_hold", "startup_boost", "peak_memory", "throttle_poll"]);

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (!Number.isFinite(value)) return "∞";
  if (Math.abs(value) >= 10 ** digits || Number.isInteger(value)) return Math.round(value).toLocaleString("en-GB");
  return Number(value.toPrecision(digits)).toString();
}

// Four digits, large ones with a letter: 62.5, 2,000, 12.5 k, 8.64 M.
export function short(value) {
  let power = 0;
  for (; Math.abs(value) >= (power ? 999.95 : 9999.5) && power < 5; power += 1) value /= 1000;
  return number(value, 4) + ["", " k", " M", " G", " T", " P"][power];
}

// A thousandth of a core is as fine as it is shown.
export const cores = (value) => number(Number.isFinite(value) ? Math.round(1000 * value) / 1000 : value, 3);

// Numbers of one figure as texts, all with as many digits after the point: `usual` ones, fewer where the largest is long.
export function evenly(values, usual = 2) {
  const most = Math.max(0, ...values.map((value) => Math.abs(value ?? 0)));
  const digits = most >= 1000 ? 0 : most >= 100 ? Math.min(1, usual) : most >= 0.1 || !most ? usual : 4;
  return values.map((value) => (value === null || value === undefined ? NONE : value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits })));
}

// Cores in a column of a table.
export const columnCores = (value) => evenly([value, 1])[0];

export const evenPercents = (ratios) => evenly(ratios.map((ratio) => (isKnown(ratio) ? 100 * ratio : ratio)), 1).map((text) => (text === NONE ? text : `${text} %`));

export const percent = (ratio) => (ratio === null || ratio === undefined || Number.isNaN(ratio) ? NONE : `${number(100 * ratio, 3)} %`);

// A part of the tree, with its resource where that is not CPU: 3.3 % (by job slots).
export const share = (ratio, resource) => (resource && resource !== "cpu" ? `${percent(ratio)} (by ${resource.replace("user_slots", "job slots")})` : percent(ratio));

export function bytes(value) {
  let power = 0;
  for (; value >= 1024 && power < 5; power += 1) value /= 1024;
  return isKnown(value) ? `${number(value, 3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}` : NONE;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 2)} h`;
  return `${number(seconds / 86400, 2)} d`;
}

// Time since a start, 1:05:30, or shorter where all that is shown are multiples of `step` seconds: 0.2 s, 6 h, 5 d.
export function elapsed(seconds, step = 1) {
  if (step < 1) return `${number(seconds, 4)} s`;
  if (step >= 86400) return `${number(seconds / 86400)} d`;
  if (step >= 3600) return `${number(seconds / 3600)} h`;
  const two = (value) => String(Math.floor(value) % 60).padStart(2, "0");
  return `${Math.floor(seconds / 3600)}:${two(seconds / 60)}:${two(seconds)}`;
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("sv-SE", { year: "numeric", month: "2-digit", day: "2-digit" });

export function time(at) {
  if (at === null || at === undefined) return NONE;
  const date = new Date(1000 * at);
  const clock = CLOCK.format(date);
  return date.toDateString() === new Date().toDateString() ? clock : `${DAY.format(date)} ${clock}`;
}

// The zone of all times that are shown: UTC, CET, GMT+5:30.
export const zone = (at = Date.now() / 1000) => new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(new Date(1000 * at)).find(({ type }) => type === "timeZoneName").value;

// A sentence of a program, its times in UTC (a clock alone is of today) as all others here.
export function localTimes(text) {
  const today = new Date().toISOString().slice(0, 10);
  return String(text ?? "").replace(/(?:\b(\d{4}-\d\d-\d\d) )?\b(\d\d:\d\d:\d\d) UTC\b/g,
    (all, day, clock) => { const at = Date.parse(`${day ?? today}T${clock}Z`) / 1000; return Number.isNaN(at) ? all : `${time(at)} ${zone(at)}`; });
}

const ID = "([0-9a-f]{1,8})(?:-[0-9a-f]{1,8}){3}";
const JOB_OF = new RegExp(`\\bjob ${ID} (?=of operation)`, "g");
const NAMED = new RegExp(`("?)\\b${ID}\\1( (?="))?`, "g");

// A sentence without ids: operations by their titles, where it has them or `titles` does; else the first part of an id.
export const withoutIds = (text, titles = {}) => String(text ?? "").replace(JOB_OF, "a job ").replace(NAMED, (all, quote, short, titled) => {
  const title = titles[all.replace(/[" ]/g, "")];
  return titled ? "" : title ? `"${title}"` : quote + short + quote;
});

// The name of a job in its operation: its number, of one that was started by an old version the first part of its id.
export const jobName = ({ id, cookie = -1 }) => `job ${cookie < 0 ? id.split("-")[0] : cookie}`;

// Core-hours: a thousandth is as fine as they are shown.
export function hours(value, digits = 3) {
  const size = Math.abs(value ?? 0);
  return size > 0 && size < 0.001 ? `${value < 0 ? "> −" : "< "}0.001` : size > 0 && size < 1 ? value.toFixed(3) : number(value ?? 0, digits);
}

export const count = (value, noun, plural = `${noun}s`) => `${number(value, 6)} ${value === 1 ? noun : plural}`;

export const isKnown = (value) => value !== null && value !== undefined;

export const hasAny = (values) => Object.values(values ?? {}).some((value) => value !== 0);

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// {cpu: 2, memory: 0} as text, with those of 0: a limit of 0 is one.
export const allAmounts = (values) => Object.entries(values).map(([name, value]) => amount(name, value)).join(", ");

// {cpu: 2, memory: 1024} as text
export const amounts = (values) => (allAmounts(Object.fromEntries(Object.entries(values ?? {}).filter(([, value]) => value !== 0))) || "nothing");

export function amount(name, value) {
  if (name === "cpu") return `${cores(value)} ${cores(value) === "1" ? "core" : "cores"}`;
  if (name === "memory") return `${bytes(value)} memory`;
  return `${number(value)} ${name === "user_slots" ? (value === 1 ? "slot" : "slots") : name}`;
}

// ---- numbers of jobs, as the command line writes them

// Up to two digits after the point, below one core three: 3.2, 10, 0.004; <0.001 for less.
export function formatCores(cores) {
  if (cores === null || cores === undefined) return "no limit";
  if (cores > 0 && cores < 0.001) return "<0.001";
  const size = Math.abs(cores);
  if (size > 0 && size < 0.01) return String(Number(cores.toPrecision(2)));
  return String(Number(cores.toFixed(size < 1 ? 3 : 2)));
}

// Measured cores with two digits after the point, below one core with three, as the command line has them.
export const measured = (value) => fixed(value, Math.abs(value ?? 1) < 1 ? 3 : 2);

export const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export const formatVotes = (votes) => (votes === null || votes === undefined ? "–" : votes > 0 ? `+${votes}` : String(votes));

export const formatRatio = (ratio, digits = 0) => `${(100 * (ratio ?? 0)).toFixed(digits)} %`;

// A time span: 0.4 s, 12 s, 3 min 5 s, 2 h 1 min, 3 d 4 h.
export function formatSpan(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${Math.max(seconds, 0).toFixed(1).replace(/\.0$/, "")} s`;
  const whole = Math.round(seconds);
  for (const [size, unit, part, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor((whole % size) / part);
      return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
    }
  }
  return `${whole} s`;
}

// A value of job-cpu-monitor as people write it; durations that are numbers are milliseconds, as YTsaurus has them.
export function formatOption(name, value) {
  if (value === null || value === undefined) return "–";
  if (DURATIONS.has(name) && typeof value === "number") return value % 1000 ? `${number(value, 6)} ms` : `${number(value / 1000, 6)} s`;
  return typeof value === "string" ? value : JSON.stringify(value);
}
