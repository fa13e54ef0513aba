/** Facts about a call that waits for a person: what differs from the conversation, what is repeated. Pure. */

/** A value as the words in which a text may have it; a number in the forms that people write. */
function spellings(value) {
  if (typeof value !== "number") return [String(value).toLowerCase()];
  const fixed = value.toFixed(2);
  return [String(value), fixed, fixed.replace(".", ",")];
}

/** Whether a text has a value, not as a part of a longer word or number. */
export function mentions(text, value) {
  const lower = text.toLowerCase().replace(/(\d)[ ',](?=\d{3}(\D|$))/g, "$1");
  for (const each of spellings(value)) {
    for (let at = lower.indexOf(each); at >= 0; at = lower.indexOf(each, at + 1)) {
      const before = lower[at - 1] ?? " ", after = lower.slice(at + each.length);
      const isPart = /[\p{L}\p{N}]/u.test(before) || /^[\p{L}\p{N}]/u.test(after) || /^[.,]\d/.test(after)
        || /\d[.,]$/.test(lower.slice(0, at));
      if (!isPart) return true;
    }
  }
  return false;
}

/** Amounts and names among the arguments, by their places: `[["order.id", "A-17"], …]`. */
export function valuesOf(value, path = []) {
  if (value !== null && typeof value === "object") {
    return Object.entries(value).flatMap(([name, each]) => valuesOf(each, [...path, name]));
  }
  const isTelling = typeof value === "number" || (typeof value === "string" && /\d/.test(value) && value.length < 80);
  return isTelling ? [[path.join("."), value]] : [];
}

const sorted = (_, value) => (value && typeof value === "object" && !Array.isArray(value)
  ? Object.fromEntries(Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1)))
  : value);
const sameText = (value) => JSON.stringify(value, sorted);

/**
 * `[{place, text, run}]`: what a person should see before deciding.
 *
 * `text`: all that was said in the conversation; null: not read yet. `others`: calls of the tenant, decided or not.
 * `run`: the other run that a fact is about.
 */
export function factsOf(asked, text, others) {
  const facts = [];
  const rest = others.filter((each) => each.id !== asked.id && each.tool === asked.tool && each.status !== "cancelled");
  for (const [place, value] of valuesOf(asked.arguments)) {
    if (text !== null && !mentions(text, value)) {
      facts.push({ place, text: `${place} ${value} is not in the conversation` });
    }
    const other = typeof value === "string" && rest.find((each) => each.user !== asked.user
      && valuesOf(each.arguments).some(([, theirs]) => theirs === value));
    if (other) {
      facts.push({ place, text: `${value} is in a call for ${other.user ?? "nobody"}, too`, run: other.run_id });
    }
  }
  const again = rest.find((each) => sameText(each.arguments) === sameText(asked.arguments));
  if (again) {
    const decided = again.resolution?.decision === "deny" ? "was denied" : "was approved";
    const said = again.status === "pending" ? "waits, too" : again.status === "expired" ? "expired" : decided;
    facts.push({ place: "", text: `the same call for ${again.user ?? "nobody"} ${said}`, run: again.run_id });
  }
  return facts;
}
