/** Data of a page: read now, and again after a time or on demand. */
import { signal } from "@preact/signals";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { connected, get } from "./api.js";

/** Pauses before a failed read is repeated. After the last pause and another failure, the read ends. */
const PAUSES_MS = [1000, 2000, 4000, 8000, 15_000];
/** True for errors that may pass: no connection, too many requests, an error of the server. */
const mayPass = ({ status }) => status === 0 || status === 429 || status >= 500;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const never = () => false;
const unread = (path) => ({ path, data: null, error: null, retries: false, loading: path !== null });

/**
 * Read a path. Read it again every `everyMs`, while the page is visible, until `ended(data)`, and when the
 * server answers again.
 *
 * Return `{data, error, retries, loading, reload}`. Old data stay until new data have arrived. `retries`:
 * true while a failed read is repeated. `reload` returns a promise: true after a success.
 * A null path reads nothing. `from` reads a path; it must be a constant function.
 *
 * @param {string | null} path
 * @param {{everyMs?: number, ended?: (data: any) => boolean, from?: (path: string) => Promise<any>}} [options]
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
  const newest = useRef(Promise.resolve(false));
  const attempt = async (turn) => {
    for (const ms of [...PAUSES_MS, null]) {
      try {
        const data = await from(path);
        if (turn !== current.current) break;
        setState({ path, data, error: null, retries: false, loading: false });
        answered.current = turn;
        return true;
      } catch (error) {
        if (turn !== current.current) break;
        const retries = ms !== null && mayPass(error);
        setState((old) => ({ path, data: old.path === path ? old.data : null, error, retries, loading: false }));
        if (retries) await pause(ms);
        else answered.current = turn;
        if (!retries) return false;
      }
      if (turn !== current.current) break;
    }
    return newest.current; // a newer question has taken the place of this one
  };
  const read = useCallback(() => {
    if (path !== null) newest.current = attempt(++current.current);
    return newest.current;
  }, [path]);
  useEffect(() => {
    setState((old) => (old.path === path ? old : unread(path)));
    read();
    const again = () => document.visibilityState === "visible" && !over.current && read();
    document.addEventListener("visibilitychange", again);
    // Wait for a slow answer: new requests would make each answer outdated.
    const timer = everyMs ? setInterval(() => answered.current === current.current && again(), everyMs) : 0;
    const forget = connected.subscribe((isUp) => void (isUp && lost.current && read()));
    return () => {
      current.current++;
      newest.current = Promise.resolve(false);
      clearInterval(timer);
      forget();
      document.removeEventListener("visibilitychange", again);
    };
  }, [read, everyMs]);
  return { ...state, reload: read };
}

/** Read several paths at once, which spaces separate; for `from` of `useData`. */
export const getAll = (paths) => Promise.all(paths.split(" ").map((path) => get(path)));

/** Calls that wait for people: `useData` of `GET /v1/interrupts?status=pending`, read once for all pages. */
export const pending = signal(/** @type {any} */ ({ data: null, error: null, retries: true }));
