/** Requests that may be sent again, because the answer did not come, and happen once. */
import { useRef } from "preact/hooks";

import { newId, post } from "./api.js";

/** True if the server may have done what it was asked for, though the answer is an error. */
const isOpen = ({ status, code }) => status === undefined || status === 0 || status >= 500 || code === "in_flight";

/** The last requests of places that may be left and shown again. */
const places = new Map();

/**
 * `[postOnce, lost]`: send a POST; return the path of one with this body whose answer is not known,
 * or null. Until it is, the same request keeps its key, so that the server does it once; another
 * request has another. `place`: the key stays while another page is shown, as what was typed does.
 */
export function usePostOnce(place) {
  const own = useRef({ last: null });
  if (place !== undefined && !places.has(place)) places.set(place, { last: null });
  const at = place === undefined ? own.current : places.get(place);
  const lost = (body = {}) => (at.last?.body === JSON.stringify(body) ? at.last.path : null);
  const postOnce = async (path, body = {}) => {
    if (lost(body) !== path) at.last = { path, body: JSON.stringify(body), key: newId() };
    const mine = at.last;
    const forget = () => at.last === mine && (at.last = null);
    try {
      const answer = await post(path, body, { headers: { "Idempotency-Key": mine.key } });
      forget();
      return answer;
    } catch (problem) {
      if (!isOpen(problem)) forget();
      throw problem;
    }
  };
  return [postOnce, lost];
}
