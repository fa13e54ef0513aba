/** Work that a button or a form starts. */
import { useState } from "preact/hooks";

/**
 * `{busy, error, work, setError}`. `work(act, name)` awaits `act` and returns what it does; `busy` is the name of the
 * work under way, else ""; `error`: what the last one failed with.
 */
export function useWork() {
  const [busy, setBusy] = useState("");
  const [error, setError] = useState(null);
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
  return { busy, error, work, setError };
}

/** What a form does instead of being sent by the browser. */
export const instead = (act) => (event) => {
  event.preventDefault();
  return act(event);
};

const AT_ONCE = 4;

/** Do `act` with each item, a few at once; return how many it worked for, and the first reason why not. */
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
