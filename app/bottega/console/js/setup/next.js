/** What is set up on this installation, and what comes next; until all is done, or somebody hides it. */
import { useState } from "preact/hooks";

import { post, ROOT, url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Link, Panel } from "../parts/basics.js";
import { DialogForm } from "../parts/dialog.js";
import { may } from "../person.js";
import { follow } from "../router.js";
import { info, isOpen } from "./model.js";

const HIDDEN = `bottega.setup${ROOT}`;

/** `hasRun`: true or false once the runs were read; null before. */
export function NextSteps({ hasRun }) {
  const [choice, setChoice] = useState(localStorage.getItem(HIDDEN));
  const agents = useData(choice === "yes" || !may("define") ? null : "/v1/agents?limit=1");
  if (!may("define") || info.value === null) return null;
  const hide = (hidden) => {
    localStorage.setItem(HIDDEN, hidden ? "yes" : "no");
    setChoice(hidden ? "yes" : "no");
  };
  const hasAgents = agents.data ? agents.data.items.length > 0 : null;
  if (choice === null && [hasAgents, hasRun].some((each) => typeof each !== "boolean")) return null;
  const isHidden = choice === null ? !info.value.demo_model && hasAgents && hasRun : choice === "yes";
  if (isHidden) return html`<p><${Button} kind="small ghost" onClick=${() => hide(false)}>Set up and templates<//></p>`;
  return html`<${Panel} title="Set up" actions=${html`<${Button} kind="small ghost"
    onClick=${() => hide(true)}>Hide this list<//>`}>
    <ul class="rows steps">
      <${Step} done=${!info.value.demo_model} what="Connect a model" way=${html`<${Button} kind="small"
        onClick=${() => (isOpen.value = true)}>Choose one<//>`}>
        ${info.value.demo_model ? "The demo model answers until then."
          : html`<code>${info.value.model}</code> answers.`}
      <//>
      <${Step} done=${hasAgents} what="Define an agent"
        way=${html`<${Link} path=${["agents", "+new"]}>Write one<//>`}>Or begin with a template below.<//>
      <${Step} done=${hasRun} what="Ask, and watch it live"
        way=${html`<${Link} path=${["chat"]}>Ask an agent<//>`}>
        Each run shows its agents, tools and answers as they come.<//>
    </ul>
    <${Templates} />
  <//>`;
}

const Step = ({ done, what, way, children }) => html`<li><span aria-hidden="true">${done ? "●" : "○"}</span>${" "}
  <strong>${what}</strong> <span class="small soft">${done ? "Done. " : "Next. "}${children}</span>${" "}
  ${!done && way}</li>`;

/** What is in examples/, as tests/flows/test_templates.py writes it. */
const EXAMPLES = new URL("./examples.json", import.meta.url);
const readExamples = async () => (await fetch(EXAMPLES)).json();

function Templates() {
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
  const ask = async (postOnce) => {
    await store(template.definitions);
    const lines = question.split("\n").filter((line) => line.trim());
    await follow(template.batch
      ? postOnce("/v1/batches", { ...template.run, items: lines.map((input) => ({ input })) })
      : postOnce("/v1/runs", { ...template.run, input: question }),
    ({ id }) => [template.batch ? "batches" : "runs", id]);
  };
  const names = (template.definitions.agents ?? []).map(({ name }) => name).join(", ");
  const about = html`<p>${template.about}</p>
    <p class="small soft">It stores ${names}, for you to change under Agents.</p>`;
  return html`<${DialogForm} title=${template.title} about=${about} label="Ask" send=${ask} onClose=${onClose}>
      <label>${template.batch ? "One question a line" : "Question"} <textarea rows="4" required value=${question}
        onInput=${(e) => setQuestion(e.target.value)}></textarea></label><//>`;
}
