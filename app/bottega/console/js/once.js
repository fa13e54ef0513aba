/** Requests that may be sent again, because the answer did not come, and happen once. */
import { useRef } from "preact/hooks";

import { newId, post } from "./api.js";

/** True if the server may have done what it was asked for, though the answer is an error. */
const isOpen = ({ status, code }) => status === undefined || status === 0 || status >= 500 || code === "in_flight";

/**
 * `[postOnce, repeats]`: send a POST; say whether such a one was sent whose answer is not known. Until
 * it is, the same request keeps its key, so that the server does it once; another request has another.
 */
export function usePostOnce() {
  const last = useRef(null);
  const request = (path, body) => JSON.stringify([path, body]);
  const repeats = (path, body = {}) => last.current?.request === request(path, body);
  const postOnce = async (path, body = {}) => {
    if (!repeats(path, body)) last.current = { request: request(path, body), key: newId() };
    const mine = last.current;
    const forget = () => last.current === mine && (last.current = null);
    try {
      const answer = await post(path, body, { headers: { "Idempotency-Key": mine.key } });
      forget();
      return answer;
    } catch (problem) {
      if (!isOpen(problem)) forget();
      throw problem;
    }
  };
  return [postOnce, repeats];
}
