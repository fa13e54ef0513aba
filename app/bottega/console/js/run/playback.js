/** A finished run again, event by event, from its log. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/basics.js";
import { marksOf } from "./marks.js";
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
  const marks = useMemo(() => (enabled ? marksOf(run.events) : []), [enabled, total]);
  if (!enabled || total < 2) return null;
  const play = () => {
    if (at === null) show(1);
    setPlaying(!playing);
  };
  const position = at ?? total;
  const moveTo = (next) => {
    setPlaying(false);
    show(next);
  };
  return html`<div class="playback" role="group" aria-label="Playback">
    <${Button} onClick=${play}>${playing ? "Pause" : at === null ? "Play back" : "Play"}<//>
    <${Button} kind="ghost" aria-label="Event before" aria-disabled=${position === 1}
      onClick=${() => moveTo(position - 1)}>◀<//>
    <label class="grow"><span class="hidden">Position: event</span>
      <input type="range" min="1" max=${total} value=${position}
        onInput=${(e) => moveTo(Number(e.target.value))} /></label>
    <${Button} kind="ghost" aria-label="Next event" aria-disabled=${position === total}
      onClick=${() => moveTo(position + 1)}>▶<//>
    <span class="numbers small soft">${position} of ${total} events</span>
    <label class="inline">Speed <select value=${speed} onChange=${(e) => setSpeed(Number(e.target.value))}>
      ${SPEEDS.map((each) => html`<option value=${each}>${each} ×</option>`)}</select></label>
    ${marks.length > 0 && html`<label class="inline">Jump to <select value=""
      onChange=${(e) => e.target.value && moveTo(Number(e.target.value))}><option value="">…</option>
      ${marks.map(([kind, all]) => html`<optgroup label=${kind}>${all.map(({ position: to, text }) => html`<option
        value=${to}>${`${to} · ${excerpt(text, 70)}`}</option>`)}</optgroup>`)}</select></label>`}
    ${at !== null && html`<${Button} kind="ghost" onClick=${() => show(total)}>Show the end<//>`}
    ${at !== null && html`<${Now} run=${run} event=${run.events[at - 1]} />`}
  </div>`;
}

/** What the event says at which the run is shown. */
function Now({ run, event }) {
  const { node, source, target, reason, error } = event.data;
  const who = node ?? event.agent ?? (source && target ? `${source} → ${target}` : "");
  const said = error?.message ?? reason ?? run.textOf(event.data) ?? "";
  return html`<p class="small now" role="status"><code>${event.type}</code> ${who && html`<strong>${who}</strong>`}
    ${said && html`<span class="soft"> ${excerpt(plain(said), 160)}</span>`}</p>`;
}
