/** A finished run again, event by event, from its log. */
import { useEffect, useRef, useState } from "preact/hooks";

import { html } from "../html.js";
import { Button } from "../parts/basics.js";
import { RunState } from "./state.js";

const LONGEST_MS = 1500;
const SPEEDS = [1, 4, 16];

/** `run`: the whole RunState; `onState` gets the state to show, or null for the end. */
export function Playback({ run, enabled, onState }) {
  const [at, setAt] = useState(null);
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(1);
  const shown = useRef(null);
  const total = run.events.length;

  const show = (position) => {
    if (position >= total) {
      shown.current = null;
      setAt(null);
      setPlaying(false);
      onState(null);
      return;
    }
    let state = shown.current;
    if (!state || state.events.length > position) state = new RunState();
    for (let i = state.events.length; i < position; i++) state.apply(run.events[i]);
    shown.current = state;
    setAt(position);
    // Another object, so that the page draws it.
    onState(Object.assign(Object.create(RunState.prototype), state));
  };
  useEffect(() => {
    if (!playing || at === null) return undefined;
    const gap = Date.parse(run.events[at]?.at) - Date.parse(run.events[Math.max(0, at - 1)].at);
    const timer = setTimeout(() => show(at + 1), Math.min(LONGEST_MS, gap) / speed);
    return () => clearTimeout(timer);
  }, [playing, at, speed]);
  if (!enabled || total < 2) return null;
  const play = () => {
    if (at === null) show(1);
    setPlaying(!playing);
  };
  return html`<div class="playback" role="group" aria-label="Playback">
    <${Button} onClick=${play}>${playing ? "Pause" : at === null ? "Play back" : "Play"}<//>
    <label class="grow"><span class="hidden">Position: event</span>
      <input type="range" min="1" max=${total} value=${at ?? total} onInput=${(e) => (setPlaying(false), show(Number(e.target.value)))} /></label>
    <span class="numbers small soft">${at ?? total} of ${total} events</span>
    <label class="inline">Speed <select value=${speed} onChange=${(e) => setSpeed(Number(e.target.value))}>${SPEEDS.map((each) => html`<option value=${each}>${each} ×</option>`)}</select></label>
    ${at !== null && html`<${Button} kind="ghost" onClick=${() => show(total)}>Show the end<//>`}
  </div>`;
}
