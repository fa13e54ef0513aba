/** The choice of the run to compare with: the one that it repeats, the latest alike, or an id. */
import { useState } from "preact/hooks";

import { url, withQuery } from "../api.js";
import { shortId } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Empty, Panel, Status, Time } from "../parts/basics.js";
import { Pages } from "../parts/lists.js";
import { titleOf, worth } from "../parts/run_table.js";

const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/;

/** How another run relates to this one; those that repeat each other come first. */
const relation = (run, each) =>
  each.id === run.retry_of ? "this run repeats it" : each.retry_of === run.id ? "repeats this run" : "";

export function Choice({ run, onChoose }) {
  const source = useData(run.retry_of && url`/v1/runs/${run.retry_of}`);
  const [id, setId] = useState("");
  const choose = (event) => {
    event.preventDefault();
    onChoose(id);
  };
  const alike = (each) => each.id !== run.id && each.id !== run.retry_of && each.agent === run.agent
    && each.graph === run.graph;
  return html`<${Panel} title=${`Compare ${shortId(run.id)} with`}>
    <${Pages} path=${withQuery("/v1/runs", { agent: run.agent, order: "desc" })} what="runs">${(items) => {
      const others = items.filter(alike).sort((a, b) => Number(!!relation(run, b)) - Number(!!relation(run, a)));
      const all = [...(source.data ? [source.data] : []), ...others];
      return all.length === 0
        ? html`<${Empty} title="There is no other run of it among the latest.">
          <p>Run it again, or enter the id of any run.</p><//>`
        : html`<ul class="rows">${all.map((each) => html`<li key=${each.id}><div class="actions">
            <${Button} kind="small" onClick=${() => onChoose(each.id)}
              aria-label=${`Compare with ${each.id}`}>Compare<//>
            <span>${titleOf(each, 80)}</span> <${Status} value=${each.status} /> <span class="small soft">
              ${[worth(each.outcome), each.version && `version ${each.version}`].filter(Boolean).join(" · ")} · made
              ${" "}<${Time} at=${each.created_at} /></span>
            ${relation(run, each) && html`<strong class="small">${relation(run, each)}</strong>`}</div></li>`)}</ul>`;
    }}<//>
    <form class="body filters" onSubmit=${choose}>
      <label class="grow">Id of a
        run <input class="mono" value=${id} onInput=${(e) => setId(e.target.value.trim().toLowerCase())} /></label>
      <button class="button" disabled=${!UUID.test(id) || id === run.id}>Compare</button>
    </form>
  <//>`;
}
