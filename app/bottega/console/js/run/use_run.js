/** A run's state as its events come. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { watch } from "./live.js";
import { RunState } from "./state.js";

const AT_ITS_END = ["ended", "gone"];

/**
 * The state of a run, and how the page is connected with it. `onEnd` gets the state once no more events come.
 *
 * @param {string | null} id null: there is no run to watch
 * @param {(state: RunState) => unknown} [onEnd]
 * @returns {[RunState, string]}
 */
export function useRunState(id, onEnd) {
  const [, redraw] = useState(0);
  const [link, setLink] = useState("connecting");
  const state = useMemo(() => new RunState(), [id]);
  const atEnd = useRef(onEnd);
  atEnd.current = onEnd; // that of the last drawing
  useEffect(() => {
    if (!id) return undefined;
    const onEvents = (events) => {
      for (const event of events) state.apply(event);
      redraw((n) => n + 1);
    };
    const onState = (now) => {
      setLink(now);
      if (AT_ITS_END.includes(now)) atEnd.current?.(state);
    };
    return watch(id, { onEvents, onState });
  }, [id]);
  return [state, link];
}
