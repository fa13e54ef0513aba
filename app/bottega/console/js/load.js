/** Data of a page: read now, and again after a time or on demand. */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { get } from "./api.js";

const never = () => false;

/**
 * Read a path; again every `everyMs`, while the page is visible, until `ended(data)`.
 *
 * Returns `{data, error, loading, reload}`. Old data stay while new ones are read, or cannot be.
 * A null path reads nothing.
 */
export function useData(path, { everyMs = 0, ended = never } = {}) {
  const [state, setState] = useState({ path, data: null, error: null, loading: path !== null });
  const current = useRef(0);
  const over = useRef(false);
  over.current = state.path === path && state.data !== null && ended(state.data);
  const read = useCallback(async () => {
    if (path === null) return;
    const turn = ++current.current;
    try {
      const data = await get(path);
      if (turn === current.current) setState({ path, data, error: null, loading: false });
    } catch (error) {
      if (turn !== current.current) return;
      setState((old) => ({ path, data: old.path === path ? old.data : null, error, loading: false }));
    }
  }, [path]);
  useEffect(() => {
    setState((old) => (old.path === path ? old : { path, data: null, error: null, loading: path !== null }));
    read();
    const again = () => document.visibilityState === "visible" && !over.current && read();
    document.addEventListener("visibilitychange", again);
    const timer = everyMs ? setInterval(again, everyMs) : 0;
    return () => {
      current.current++;
      clearInterval(timer);
      document.removeEventListener("visibilitychange", again);
    };
  }, [read, everyMs]);
  return { ...state, reload: read };
}
