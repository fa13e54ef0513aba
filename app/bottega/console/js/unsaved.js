/** Unsaved changes of a page, kept while the user visits other pages. */
import { key } from "./api.js";

const kept = new Map();
addEventListener("beforeunload", (event) => kept.size && event.preventDefault());

const placeOf = (what) => `${key.value} ${what}`;

/** What was kept of `what`, such as "agents/clerk", with the present key. */
export const unsaved = (what) => kept.get(placeOf(what));

/** Keep changes; null: there are none any more. */
export function keep(what, changes) {
  if (changes === null) kept.delete(placeOf(what));
  else kept.set(placeOf(what), changes);
}
