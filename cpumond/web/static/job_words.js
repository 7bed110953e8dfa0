// Numbers of jobs, as the command line writes them.

const DURATIONS = new Set(["check_period", "start_delay", "restore_hold", "startup_boost", "peak_memory", "throttle_poll"]);

// Six significant digits without zeros at the end.
export const plain = (value) => String(Number(Number(value).toPrecision(6)));

// Up to two digits after the point, below one core three: 3.2, 10, 0.004; <0.001 for less.
export function showCores(cores) {
  if (cores === null || cores === undefined) return "no limit";
  if (cores > 0 && cores < 0.001) return "<0.001";
  const size = Math.abs(cores);
  if (size > 0 && size < 0.01) return String(Number(cores.toPrecision(2)));
  return String(Number(cores.toFixed(size < 1 ? 3 : 2)));
}

// Measured cores with two digits after the point, below one core with three, as the command line has them.
export const measured = (value) => fixed(value, Math.abs(value ?? 1) < 1 ? 3 : 2);

export function fixed(value, digits = 2) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function showVotes(votes) {
  if (votes === null || votes === undefined) return "–";
  return votes > 0 ? `+${votes}` : String(votes);
}

export function showRatio(ratio, digits = 0) {
  return `${(100 * (ratio ?? 0)).toFixed(digits)} %`;
}

// A remaining time without fractions: 9m30s.
export function showLeft(seconds) {
  const whole = Math.max(Math.round(seconds), 1);
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor((whole % 3600) / 60), "m"], [whole % 60, "s"]];
  return parts.filter(([value]) => value).map(([value, unit]) => `${value}${unit}`).join("");
}

// A time span: 0.4 s, 12 s, 3 min 5 s, 2 h 1 min, 3 d 4 h.
export function showSpan(seconds) {
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
export function showOption(name, value) {
  if (value === null || value === undefined) return "–";
  if (DURATIONS.has(name) && typeof value === "number") return value % 1000 ? `${plain(value)} ms` : `${plain(value / 1000)} s`;
  return typeof value === "string" ? value : JSON.stringify(value);
}
