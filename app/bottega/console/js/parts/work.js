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
