/** When a conversation was last looked at in this browser, so that what came since is unread. */
import { signal } from "@preact/signals";

import { ROOT } from "../api.js";
import { keptIn } from "../preferences.js";

const KEPT = `bottega.seen${ROOT}`;
const MOST = 500;

/** `{since, at: {session: ms}}`; `since`: when this browser first showed the list. */
const read = () => ({ since: Date.now(), at: {}, ...keptIn(KEPT) });

const seen = signal(read());
const keep = (value) => {
  seen.value = value;
  localStorage.setItem(KEPT, JSON.stringify(value));
};
keep(seen.value);

/** True if something was said in a session since it was last looked at. */
export const isUnread = ({ id, updated_at: at }) => Date.parse(at) > (seen.value.at[id] ?? seen.value.since);

/** Note that a session is looked at, at a time of the server's clock if one is known. */
export function see(id, at = new Date().toISOString()) {
  const all = { ...read().at, [id]: Math.max(Date.parse(at), Date.now()) }; // another tab may have changed it
  const newest = Object.entries(all).sort(([, a], [, b]) => b - a).slice(0, MOST);
  keep({ since: seen.value.since, at: Object.fromEntries(newest) });
}
