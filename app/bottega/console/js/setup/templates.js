/** Teams to begin with: the project's examples. Choosing one stores it, and asks it a question. */
import { useState } from "preact/hooks";

import { post, url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Failure } from "../parts/basics.js";
import { Dialog } from "../parts/dialog.js";
import { instead, useWork } from "../parts/work.js";
import { follow } from "../router.js";

/** What is in examples/, as tests/flows/test_templates.py writes it. */
const EXAMPLES = new URL("./examples.json", import.meta.url);
const readExamples = async () => (await fetch(EXAMPLES)).json();

export function Templates() {
  const { data } = useData("examples", { from: readExamples });
  const [chosen, setChosen] = useState(null);
  return html`<div class="body"><h3>Templates</h3>
    <div class="templates">${(data ?? []).map((each) => html`<button type="button" class="button" key=${each.id}
      data-template=${each.id} onClick=${() => setChosen(each)}><strong>${each.title}</strong>
      <span class="small soft">${each.about}</span></button>`)}</div></div>
    ${chosen && html`<${Ask} template=${chosen} onClose=${() => setChosen(null)} />`}`;
}

/** Store the definitions; those that somebody has changed meanwhile stay as they are. */
async function store(definitions) {
  const { items } = await post("/v1/apply", { ...definitions, dry_run: true });
  if (items.every(({ action }) => action !== "replaced")) await post("/v1/apply", definitions);
  for (const { name } of definitions.mcp_servers ?? []) await post(url`/v1/mcp-servers/${name}/refresh`);
}

function Ask({ template, onClose }) {
  const [question, setQuestion] = useState(template.ask);
  const { busy, error, work } = useWork();
  const [postOnce] = usePostOnce();
  const ask = instead(() => work(async () => {
    await store(template.definitions);
    const lines = question.split("\n").filter((line) => line.trim());
    await follow(template.batch
      ? postOnce("/v1/batches", { ...template.run, items: lines.map((input) => ({ input })) })
      : postOnce("/v1/runs", { ...template.run, input: question }),
    ({ id }) => [template.batch ? "batches" : "runs", id]);
    onClose();
  }));
  const names = (template.definitions.agents ?? []).map(({ name }) => name).join(", ");
  return html`<${Dialog} title=${template.title} onClose=${onClose}>
    <p>${template.about}</p><p class="small soft">It stores ${names}, for you to change under Agents.</p>
    <form class="form" onSubmit=${ask}>
      <label>${template.batch ? "One question a line" : "Question"} <textarea rows="4" required value=${question}
        onInput=${(e) => setQuestion(e.target.value)}></textarea></label>
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Ask<//>
        <${Button} onClick=${onClose}>Cancel<//></div></form>
  <//>`;
}
