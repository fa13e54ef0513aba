/** Data of a page: read now, and again after a time or on demand. */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { connected, get } from "./api.js";

const never = () => false;
const unread = (path) => ({ path, data: null, error: null, loading: path !== null });

/**
 * Read a path; again every `everyMs`, while the page is visible, until `ended(data)`; and when the
 * server is there again that could not be reached.
 *
 * Returns `{data, error, loading, reload}`. Old data stay while new ones are read, or cannot be.
 * A null path reads nothing. `from` reads a path; it may not depend on the drawing.
 */
export function useData(path, { everyMs = 0, ended = never, from = get } = {}) {
  const [kept, setState] = useState(unread(path));
  const state = kept.path === path ? kept : unread(path); // never that of the path before
  const current = useRef(0);
  const answered = useRef(0);
  const over = useRef(false);
  over.current = state.data !== null && ended(state.data);
  const lost = useRef(false);
  lost.current = state.error?.status === 0;
  const read = useCallback(async () => {
    if (path === null) return;
    const turn = ++current.current;
    try {
      const data = await from(path);
      if (turn === current.current) setState({ path, data, error: null, loading: false });
    } catch (error) {
      if (turn !== current.current) return;
      setState((old) => ({ path, data: old.path === path ? old.data : null, error, loading: false }));
    }
    if (turn === current.current) answered.current = turn;
  }, [path]);
  useEffect(() => {
    setState((old) => (old.path === path ? old : unread(path)));
    read();
    const again = () => document.visibilityState === "visible" && !over.current && read();
    document.addEventListener("visibilitychange", again);
    // A slow answer is waited for: a newer question would make it an old one, each time.
    const timer = everyMs ? setInterval(() => answered.current === current.current && again(), everyMs) : 0;
    const forget = connected.subscribe((isUp) => void (isUp && lost.current && read()));
    return () => {
      current.current++;
      clearInterval(timer);
      forget();
      document.removeEventListener("visibilitychange", again);
    };
  }, [read, everyMs]);
  return { ...state, reload: read };
}
