/** The log of a run, event by event. */
import { useMemo, useState } from "preact/hooks";

import { html } from "../html.js";
import { Value } from "../parts/basics.js";
import { Windowed } from "../parts/windowed.js";

const ROW = 30;
const time = (at) => new Date(at).toISOString().slice(11, 23);

/** `events` grows in place: `last`, the number of the last of them, says so. */
export function EventList({ events, last, follow }) {
  const [wanted, setWanted] = useState("");
  const [open, setOpen] = useState(null);
  const shown = useMemo(() => {
    const text = wanted.trim().toLowerCase();
    return text ? events.filter((each) => `${each.type} ${each.agent ?? ""}`.toLowerCase().includes(text)) : events;
  }, [events, last, wanted]);
  const row = (event) => html`<div key=${event.seq} class=${`event-row ${open?.seq === event.seq ? "chosen" : ""}`}
    style=${{ height: `${ROW}px` }} role="listitem">
    <button type="button" aria-pressed=${open?.seq === event.seq} onClick=${() => setOpen(event)}>
      <span class="numbers soft">${event.seq}</span><span class="numbers soft wide">${time(event.at)}</span>
        <code>${event.type}</code><span>${event.agent ?? ""}</span></button></div>`;
  return html`<div class="events">
    <label class="body">Only events whose type or agent contains <input value=${wanted}
      onInput=${(e) => setWanted(e.target.value)} placeholder="tool" /></label>
    <${Windowed} items=${shown} rowHeight=${ROW} row=${row} label="Events" follow=${follow} />
    ${open && html`<div class="body"><h3>${open.seq} ${open.type}</h3><${Value} value=${open.data} /></div>`}
  </div>`;
}
