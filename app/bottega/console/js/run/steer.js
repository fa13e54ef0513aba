/** Messages to a run under way: what was sent, whether its agent has read it, and a form for the next. */
import { useState } from "preact/hooks";

import { url } from "../api.js";
import { plain } from "../format.js";
import { html } from "../html.js";
import { usePostOnce } from "../once.js";
import { Button, Panel } from "../parts/basics.js";
import { instead, useWork } from "../parts/work.js";
import { may } from "../person.js";

export function Steer({ run, state, moves }) {
  const [postOnce] = usePostOnce();
  const [text, setText] = useState("");
  const [sent, setSent] = useState({});
  const { busy, error, work } = useWork();
  const takes = moves && run.mode !== "dag" && may("run");
  // A message that was just sent comes into the log a little later.
  const known = new Set(state.messages.map((each) => each.id));
  const coming = Object.keys(sent).filter((id) => !known.has(id)).map((id) => ({ id, delivered: false }));
  const messages = [...state.messages, ...coming];
  if (!takes && !messages.length) return null;
  const send = instead(() => work(async () => {
    const { message_id: id } = await postOnce(url`/v1/runs/${run.id}/messages`, { content: text.trim() });
    setSent((old) => ({ ...old, [id]: text.trim() }));
    setText((now) => (now === text ? "" : now)); // what was typed meanwhile stays
  }));
  return html`<${Panel} title="Messages during the run">
    ${messages.length > 0 && html`<ul class="rows">${messages.map((each) => html`<li key=${each.id}>
      <pre class="text">${plain(each.content) || sent[each.id] || "A message"}</pre>
      <p class="small soft">${each.delivered ? `read by ${run.agent}`
        : "not read yet: it comes before the next model call"}</p></li>`)}</ul>`}
    ${takes && html`<form class="body filters" onSubmit=${send}>
      <label class="grow">Tell ${run.agent} something <input value=${text} onInput=${(e) => setText(e.target.value)} />
        </label>
      <${Button} type="submit" busy=${busy} disabled=${!text.trim()}>Tell it<//></form>`}
    ${error && html`<p class="bad-text small" role="alert">${error.message}</p>`}
  <//>`;
}
