/** Keys that act on the page. */
import { useLayoutEffect, useRef, useState } from "preact/hooks";

/** Whether a key is meant for the page: pressed once, outside of fields, and no shortcut of the browser. */
const isForPage = (event) =>
  !event.repeat && !event.ctrlKey && !event.metaKey && !event.altKey
  && !event.target.closest("input, textarea, select, dialog");

/** Keys that end what is typed into a field, after which keys act on the page again. */
export const LEAVING = ["Enter", "Escape"];
/** For a field: leave it by these keys. What the field itself does with Enter comes first. */
export const leave = (event) => !event.isComposing && LEAVING.includes(event.key)
  && setTimeout(() => event.target.blur());

/** Do what `acts` has for a key, such as `{j: next}`. A key meets what is drawn at that moment. */
export function useKeys(acts) {
  useLayoutEffect(() => {
    const onKeyDown = (event) => {
      const act = isForPage(event) && acts[event.key];
      if (!act) return;
      event.preventDefault(); // else the key is typed into the field that it opens
      act();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });
}

/**
 * The field for why something is refused: after `ask()` Enter sends (`isAsked`), after `note()` Enter only leaves it
 * (`isKept`); Escape goes back.
 */
export function useReason(send) {
  const field = useRef(null);
  const [state, setState] = useState("");
  const goTo = (next) => (setState(next), field.current.focus());
  const onKeyDown = (event) => {
    if (event.isComposing || event.repeat || !LEAVING.includes(event.key)) return;
    if (state === "asked" && event.key === "Enter") return void send();
    setState(event.key === "Enter" ? "kept" : "");
    event.target.blur();
  };
  return { field, onKeyDown, ask: () => goTo("asked"), note: () => goTo(""), isAsked: state === "asked",
    isKept: state === "kept", leave: () => (setState(""), setTimeout(() => field.current?.blur())) };
}
