/** Facts about a call that waits for a person: differences from the conversation, and repetitions. Pure. */
import { objectIn } from "../format.js";

const NUMBER = /(?<![\p{L}\p{N}]|\d[.,])(?:eur|usd|gbp|chf)?(\d+(?:[.,'’]\d+)*)(?:eur|usd|gbp|chf)?(?![\p{L}\p{N}])/gu;
const GROUPED = /^[1-9]\d{0,2}([.,'’])\d{3}(?:\1\d{3})*(?:(?!\1)[.,]\d+)?$/;
/** A number in the form of JSON; a text such as "007" is a name. */
const PLAIN = /^(?:0|[1-9]\d*)(?:\.\d+)?$/;

/** The number that people mean by `1000`, `1,000`, `1.000,00`, `15.0` or `15,50`. */
function read(written) {
  const group = GROUPED.exec(written)?.[1];
  return Number((group ? written.replaceAll(group, "") : written).replace(",", "."));
}

/** Whether a text has a number, in any notation. */
function hasNumber(text, number) {
  const joined = text.replace(/(\d)[ \u00a0\u202f](?=\d{3}(\D|$))/g, "$1"); // "1 000" may be one number or two
  return [text, joined].some((each) => [...each.matchAll(NUMBER)].some(([, written]) => read(written) === number));
}

/** Whether a text has a value, but not as a part of a longer word or number. Equal numbers are equal values. */
export function mentions(text, value) {
  const lower = text.toLowerCase(), word = String(value).toLowerCase();
  if (PLAIN.test(word) && hasNumber(lower, Number(word))) return true;
  for (let at = lower.indexOf(word); word && at >= 0; at = lower.indexOf(word, at + 1)) {
    const before = lower[at - 1] ?? " ", after = lower.slice(at + word.length);
    const isPart = /[\p{L}\p{N}]/u.test(before) || /^[\p{L}\p{N}]/u.test(after) || /^[.,]\d/.test(after)
      || /\d[.,]$/.test(lower.slice(0, at));
    if (!isPart) return true;
  }
  return false;
}

/** Amounts and names among the arguments, with their paths: `[[["order", "id"], "A-17"], …]`. */
export function valuesOf(value, path = []) {
  if (value !== null && typeof value === "object") {
    return Object.entries(value).flatMap(([name, each]) => valuesOf(each, [...path, name]));
  }
  const isTelling = typeof value === "number" || (typeof value === "string" && /\d/.test(value) && value.length < 80);
  return isTelling ? [[path, value]] : [];
}

const sorted = (_, value) => (value && typeof value === "object" && !Array.isArray(value)
  ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1)))
  : value);
const sameText = (value) => JSON.stringify(value, sorted);

/** All text of users in messages; null: no text, or files, whose content is not known here. */
export function saidByUser(messages) {
  const said = messages.filter(({ role, source }) => role === "user" && !source);
  const isText = said.every(({ parts = [] }) => parts.every(({ type }) => type === "text"));
  return said.length && isText ? said.map(({ content }) => content).join("\n") : null;
}

/** The result of a decision on a call, such as "denied". */
export function decided({ status, resolution }) {
  if (status !== "resolved") return status === "pending" ? "waiting" : status;
  if (resolution?.decision === "deny") return "denied";
  if (resolution?.decision !== "approve") return "answered";
  return resolution.arguments ? "approved with other arguments" : "approved";
}

/** Names of fields with an owner. */
const OWNER = /^(customer|user|owner|client|account)(_?(id|name))?$/i;

/** The owner in a tool's result: in the object that has the value; null: the result names no owner. */
function ownerIn(found, value) {
  if (typeof found === "string") return ownerIn(objectIn(found), value);
  if (found === null || typeof found !== "object") return null;
  const fields = Object.entries(found);
  const [, owner] = fields.find(([name, each]) => OWNER.test(name) && typeof each === "string") ?? [];
  if (owner && fields.some(([, each]) => String(each) === String(value))) return owner;
  return fields.map(([, each]) => ownerIn(each, value)).find(Boolean) ?? null;
}

/** Whether two names may mean the same person, such as "ada" and "Ada Byron". */
const isSame = (a, b) => [[a, b], [b, a]].some(([one, other]) => one.toLowerCase().includes(other.toLowerCase()));

/** Numbers are almost equal if their difference is less than this share. */
const SLIGHTLY = 0.1;

/** Whether users wrote a number that is almost equal to this number. */
const isNear = (text, number) => [...text.toLowerCase().matchAll(NUMBER)].some(([, written]) =>
  Math.abs(read(written) - number) <= SLIGHTLY * Math.abs(number));

/**
 * `[{name, text, run, isGrave}]`: facts that a person should see before the decision.
 *
 * `text`: all text of the users in the conversation; null: not known. `others`: calls of the tenant, with a decision
 * or without. `results`: results of earlier tools. `name`: the argument of the fact; null: the fact is about the call.
 * `run`: the other run of the fact.
 * `isGrave`: true if a value belongs to another user, a call is repeated, or nobody wrote or looked up an amount. Other
 * values may be missing in messages for a good reason, or differ a little.
 */
export function factsOf(asked, text, others, results = []) {
  const facts = [];
  const rest = others.filter(({ id, tool, kind, status }) =>
    id !== asked.id && tool === asked.tool && kind === asked.kind && status !== "cancelled");
  for (const [[name, ...below], value] of valuesOf(asked.arguments)) {
    const place = [name, ...below].join("."), isNumber = typeof value === "number";
    if (text !== null && !mentions(text, value)) {
      const from = results.find(({ result }) => mentions(JSON.stringify(result) ?? "", value));
      facts.push({ name, text: `${place} ${value} is not in the user's messages${from
        ? `, but in the result of ${from.name}` : ""}`, isGrave: isNumber && !from && !isNear(text, value) });
    }
    const [owner, by] = (!isNumber && asked.user && results.map(({ name: tool, result }) =>
      [ownerIn(result, value), tool]).find(([of]) => of && !isSame(of, asked.user))) || [];
    if (owner) facts.push({ name, text: `${place} ${value} is of ${owner}, by the result of ${by}`, isGrave: true });
    const other = !isNumber && rest.find((each) => each.user !== asked.user
      && valuesOf(each.arguments).some(([, theirs]) => theirs === value));
    if (other) {
      facts.push({ name, text: `${value} is in a call for ${other.user ?? "a user without a name"}, too`,
        run: other.run_id, isGrave: true });
    }
  }
  const again = rest.find((each) => sameText(each.arguments) === sameText(asked.arguments));
  if (again) {
    const became = { pending: "waits, too", expired: "expired" }[again.status] ?? `was ${decided(again)}`;
    const changed = again.resolution?.arguments ? `: ${JSON.stringify(again.resolution.arguments)}` : "";
    facts.push({ name: null, text: `the same call for ${again.user ?? "a user without a name"} ${became}${changed}`,
      run: again.run_id, isGrave: true });
  }
  return facts;
}

/**
 * `[{name, value, limit}]`: arguments above the limits in `confirm_above`, and arguments that are no numbers.
 *
 * @param {{arguments: object, confirm_above?: Record<string, number> | null}} asked
 * @param {object} [given] other arguments
 */
export function largeArguments(asked, given = asked.arguments) {
  return Object.entries(asked.confirm_above ?? {}).flatMap(([feature, limit]) => {
    const [, ...path] = feature.split(".");
    const value = path.reduce((found, name) => found?.[name], given);
    const isSmall = value == null || (typeof value === "number" && value <= limit);
    return isSmall ? [] : [{ name: path.join("."), value: typeof value === "object" ? "(no number)" : value, limit }];
  });
}
