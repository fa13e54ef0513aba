/** Work that a button or a form starts. */
import { useState } from "preact/hooks";

import { usePostOnce } from "../once.js";

/**
 * `{busy, error, work, setError, postOnce}`. `work(act, name)` awaits `act` and returns its result; `busy` is the name
 * of the work in progress; "": none. `error`: the error of the last work that failed. `postOnce`: of `usePostOnce`.
 */
export function useWork() {
  const [busy, setBusy] = useState("");
  const [error, setError] = useState(null);
  const [postOnce] = usePostOnce();
  const work = async (act, name = "work") => {
    setBusy(name);
    setError(null);
    try {
      return await act();
    } catch (problem) {
      setError(problem);
      return undefined;
    } finally {
      setBusy("");
    }
  };
  return { busy, error, work, setError, postOnce };
}

/** The handler of a form that the browser does not send. */
export const instead = (act) => (event) => {
  event.preventDefault();
  return act(event);
};

const AT_ONCE = 4;

/** Call `act` with each item, a few at once. Return the number of successes, and the reason of the first failure. */
export async function forAll(items, act) {
  const left = [...items];
  let done = 0, reason = "";
  const work = async () => {
    for (let item = left.shift(); item; item = left.shift()) {
      await act(item).then(() => done++, (problem) => (reason ||= problem.message));
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return { done, reason };
}
