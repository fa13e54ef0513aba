/** A part of a finished run again: from a node of its graph on, in a new run. */
import { useState } from "preact/hooks";

import { url } from "../api.js";
import { html } from "../html.js";
import { usePostOnce } from "../once.js";
import { Button, Failure } from "../parts/basics.js";
import { Dialog } from "../parts/dialog.js";
import { instead, useWork } from "../parts/work.js";
import { follow } from "../router.js";
import { isFinal } from "./state.js";

/** The node of a task, if the run can be repeated from it; nodes of graphs in the graph cannot. */
function nodeOf(run, task) {
  const name = task.node ?? task.agent;
  return run.mode === "dag" && isFinal(run.status) && task.parent === null && !name.includes("/") ? name : null;
}

/** The button beside a node, with what it opens. */
export function Fork({ run, state, task }) {
  const [open, setOpen] = useState(false);
  const node = nodeOf(run, task);
  if (node === null) return null;
  const published = state.published.findLast((each) => each.agent === node);
  return html`<${Button} needs="run" kind="small" onClick=${() => setOpen(true)}>Repeat from here<//>
    ${open && html`<${Form} run=${run} node=${node} text=${published ? state.textOf(published.data) : ""}
      onClose=${() => setOpen(false)} />`}`;
}

function Form({ run, node, text, onClose }) {
  const [postOnce] = usePostOnce();
  const [gives, setGives] = useState(false);
  const [publication, setPublication] = useState(text);
  const { busy, error, work } = useWork();
  const start = instead(() => work(async () => {
    const body = gives ? { node, publication } : { node };
    await follow(postOnce(url`/v1/runs/${run.id}/fork`, body), ({ id }) => ["runs", id]);
    onClose();
  }));
  return html`<${Dialog} title=${`Repeat from ${node}`} onClose=${onClose}>
    <form class="form" onSubmit=${start}>
      <p class="small soft">A new run takes over what came before, at no cost. ${node} and all nodes that follow it are
        done again.</p>
      <label class="inline"><input type="checkbox" checked=${gives} onChange=${(e) => setGives(e.target.checked)} />
        Publish my text, and do not ask ${node}</label>
      <label>What ${node} publishes
        <textarea rows="8" disabled=${!gives} value=${publication}
          onInput=${(e) => setPublication(e.target.value)}></textarea></label>
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions">
        <${Button} type="submit" kind="primary" busy=${busy} disabled=${gives && !publication.trim()}>Repeat<//>
        <${Button} onClick=${onClose}>Cancel<//></div>
    </form>
  <//>`;
}
