/** Numbers, amounts and times as text. Pure, except for the language and time zone of dates. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
let exactTime, dayTime, day, relative;
setDates("en", "");

/** Set the language of dates and times, and their time zone; "": the browser's. */
export function setDates(language, zone) {
  const timeZone = zone || undefined;
  exactTime = new Intl.DateTimeFormat(language, { year: "numeric", month: "short", day: "numeric", hour: "2-digit",
    minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZoneName: "short", timeZone });
  dayTime = new Intl.DateTimeFormat(language, { timeStyle: "short", hourCycle: "h23", timeZone });
  day = new Intl.DateTimeFormat(language, { dateStyle: "short", timeZone });
  relative = new Intl.RelativeTimeFormat(language, { numeric: "auto", style: "long" });
}

const NONE = "–";

export const count = (value) => (value == null ? NONE : whole.format(value));
export const tokens = (value) =>
  value == null ? NONE : value < 10_000 ? whole.format(value) : short.format(value);

/** The amount of a cost; null: no call has a known price. */
export const knownAmount = (cost) => (!cost || (Number(cost.amount) === 0 && cost.complete === false) ? null
  : cost.amount);

/** An amount of money: at least two decimals, and enough decimals to show a digit other than zero. */
export function money(cost) {
  if (!cost) return NONE;
  if (knownAmount(cost) === null) return "no price";
  const amount = Number(cost.amount);
  const digits = amount === 0 || amount >= 0.1 ? 2 : Math.min(9, Math.ceil(-Math.log10(amount)) + 1);
  const sign = cost.complete === false ? "≥ " : "";
  return `${sign}${amount.toFixed(digits)} ${cost.currency}`;
}

/** A duration in milliseconds, as text with at most two units. */
export function duration(ms) {
  if (ms == null || Number.isNaN(ms)) return NONE;
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(1)} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A duration in seconds that is exact to 10 %. */
export const about = (value) => (value == null ? NONE : `≈ ${seconds(Number(value.toPrecision(2)))}`);
export const seconds = (value) => (value == null ? NONE : duration(1000 * value));
export const exact = (at) => (at ? exactTime.format(new Date(at)) : NONE);

export const dayOf = (at) => day.format(new Date(at));

/** The time of day; for another day, with the date. */
export const clock = (at) =>
  day.format(new Date(at)) === day.format(new Date()) ? dayTime.format(new Date(at)) : exact(at);

/** @type {[number, Intl.RelativeTimeFormatUnit, number][]} */
const STEPS = [
  [60, "second", 1],
  [3600, "minute", 60],
  [86_400, "hour", 3600],
  [Infinity, "day", 86_400],
];

/** The distance of a time from now, such as "3 minutes ago". */
export function ago(at, now = Date.now()) {
  if (!at) return NONE;
  const s = (new Date(at).getTime() - now) / 1000;
  const [, unit, size] = STEPS.find(([limit]) => Math.abs(s) < limit);
  return relative.format(Math.round(s / size), unit);
}

/** The first characters of a text, on one line. */
export function excerpt(text, most = 140) {
  const line = plain(text).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** The full stop after a text, unless the text ends with a full stop. */
export const stopAfter = (text) => (/[.!?…]$/.test(text.trim()) ? "" : ".");

/** The text of an input or a message: a string, or a list of messages or parts. */
export function plain(value) {
  if (value == null) return "";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map(plain).filter(Boolean).join("\n");
  if (value.type === "text") return value.text;
  if (value.content !== undefined) return plain(value.content);
  if (value.type) return `[${value.type}]`;
  return JSON.stringify(value);
}

/** The object or list that a text is in JSON, such as the answer of an agent with a schema; null: it is none. */
export function objectIn(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export const shortId = (id) => (id ? `${id.slice(0, 4)}…${id.slice(-6)}` : NONE);
