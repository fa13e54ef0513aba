/** Requests that the server executes only once, even if the console repeats them after a lost answer. */
import { useRef } from "preact/hooks";

import { newId, post } from "./api.js";

/** True if the server may have executed the request although the answer is an error. */
const isOpen = ({ status, code }) => status === undefined || status === 0 || status >= 500 || code === "in_flight";

/** The last request of each page that keeps its request while another page is shown. */
const places = new Map();

/**
 * Return two functions. `postOnce(path, body)` sends a POST. If its answer is lost, the same request
 * is sent with the same key the next time, so the server executes it once; a different request has
 * a different key. `lost(body)` returns the path of the request with this body whose answer was lost, or null.
 * `place`: a name under which the key is kept while another page is shown.
 *
 * @param {string} [place]
 * @returns {[(path: string, body?: object) => Promise<any>, (body?: object) => string | null]}
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
