/** The search field for conversations: names, words and dates. Pure. */

const DAY_MS = 86_400_000;
const NEAR = { today: 0, yesterday: 1 };

const startOf = (year, month, day) => new Date(year, month - 1, day);
/** The days of a word, as `[first, end]`; null: the word is no date. `2026-11-28`, `2026-11`, `28.11.`, `today`. */
function daysOf(word, now) {
  const today = startOf(now.getFullYear(), now.getMonth() + 1, now.getDate());
  const lower = word.toLowerCase();
  if (lower in NEAR) return dayFrom(new Date(today.getTime() - NEAR[lower] * DAY_MS + DAY_MS / 2));
  const iso = /^(\d{4})-(\d\d?)(?:-(\d\d?))?$/.exec(word);
  if (iso) {
    const [year, month, day] = iso.slice(1).map(Number);
    return day ? dayFrom(startOf(year, month, day)) : [startOf(year, month, 1), startOf(year, month + 1, 1)];
  }
  const dotted = /^(\d\d?)\.(\d\d?)\.(\d{4})?$/.exec(word);
  if (!dotted) return null;
  const [day, month, year] = dotted.slice(1).map(Number);
  const found = startOf(year || now.getFullYear(), month, day);
  return dayFrom(year || found <= now ? found : startOf(now.getFullYear() - 1, month, day));
}

function dayFrom(at) {
  const [year, month, day] = [at.getFullYear(), at.getMonth() + 1, at.getDate()];
  return [startOf(year, month, day), startOf(year, month, day + 1)];
}

/**
 * The words of a text, and the time from its first date to its last.
 *
 * @param {string} text
 * @returns {{q: string, active_after?: string, active_before?: string}}
 */
export function searchOf(text, now = new Date()) {
  const words = text.trim().split(/\s+/).filter(Boolean);
  const days = words.map((each) => daysOf(each, now));
  const dates = days.filter(Boolean);
  const q = words.filter((_, at) => !days[at]).join(" ");
  if (!dates.length) return { q };
  return { q, active_after: new Date(Math.min(...dates.map(([first]) => first.getTime()))).toISOString(),
    active_before: new Date(Math.max(...dates.map(([, end]) => end.getTime()))).toISOString() };
}
