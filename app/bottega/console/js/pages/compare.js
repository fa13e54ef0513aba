/** Two runs side by side: figures, outputs, and what each agent received. */
import { useState } from "preact/hooks";

import { url, withQuery } from "../api.js";
import { AgentDifference } from "../compare/agent.js";
import { Choice } from "../compare/choice.js";
import { Differences } from "../compare/figures.js";
import { rowsOfTexts } from "../compare/rows.js";
import { Sides } from "../compare/sides.js";
import { plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Copy, Empty, Link, Loaded, Panel, Status, Time } from "../parts/basics.js";
import { usePages } from "../parts/lists.js";
import { worth } from "../parts/run_table.js";
import { go } from "../router.js";
import { isFinal } from "../run/state.js";

export function Compare({ id, query }) {
  const other = query.with ?? "";
  const [chooses, setChooses] = useState(false);
  const run = useData(url`/v1/runs/${id}`);
  if (run.error?.status === 404) {
    return html`<div class="head"><h1>There is no such run</h1></div>
      <p><${Link} path=${["runs"]}>Show all runs<//></p>`;
  }
  // The older run is the "before"; ids begin with their time.
  const choose = (chosen) => {
    setChooses(false);
    const [before, after] = chosen < id ? [chosen, id] : [id, chosen];
    go(["runs", before, "compare"], { with: after });
  };
  return html`
    <div class="head"><h1>Compare two runs</h1>
      ${other && html`<div class="actions">
        <${Button} onClick=${() => go(["runs", other, "compare"], { with: id })}>Swap<//>
        <${Button} onClick=${() => setChooses(!chooses)} aria-expanded=${chooses}>Choose another run<//></div>`}
    </div>
    ${(!other || chooses) && html`<${Loaded} from=${run} what="the run">
      ${(found) => html`<${Choice} run=${found} onChoose=${choose} />`}<//>`}
    ${other && html`<${Both} key=${`${id} ${other}`} id=${id} other=${other} />`}`;
}

/** The agent that was asked, which is shown first; null: a graph was. */
const asked = ({ before, after }) => after.agent ?? before.agent;
const isOver = ({ before, after }) => isFinal(before.status) && isFinal(after.status);
const hasAsked = (found) => asked(found) === null || found.agents.some((each) => each.agent === asked(found));

function Both({ id, other }) {
  const found = usePages(withQuery(url`/v1/runs/${id}/diff`, { with: other }),
    { of: "agents", isEnough: hasAsked, everyMs: 3000, ended: isOver });
  return html`<${Loaded} from=${found} what="the comparison">${(both) => {
    const { before, after, total, agents, next_cursor: cursor } = both;
    const all = [...agents].sort((a, b) => Number(b.agent === asked(both)) - Number(a.agent === asked(both)));
    return html`
      <div class="sides"><${Side} name="Before" run=${before} /><${Side} name="After" run=${after} /></div>
      <${Questions} before=${before.id} after=${after.id} />
      <${Panel} title="In all"><${Differences} of=${total} label="Figures of the runs" /><//>
      ${all.length === 0 && html`<${Panel}><${Empty} title="No agent has begun in these runs." /><//>`}
      ${all.map((each) => html`<${AgentDifference} key=${each.agent} of=${each} before=${before.id} after=${after.id}
        isAsked=${each.agent === asked(both)} />`)}
      ${cursor && html`<div><${Button} onClick=${found.more}>Show more agents<//></div>`}`;
  }}<//>`;
}

/** What was asked in both runs. */
function Questions({ before, after }) {
  const [old, now] = [useData(url`/v1/runs/${before}`), useData(url`/v1/runs/${after}`)];
  return html`<${Panel} title="Question"><${Loaded} from=${old} what="the question">${(first) => html`
    <${Loaded} from=${now} what="the question">${(second) => plain(first.input) === plain(second.input)
      ? html`<div class="body"><p class="small soft">The same in both.</p>
        <pre class="text story" tabindex="0">${plain(first.input)}</pre></div>`
      : html`<${Sides} rows=${rowsOfTexts(plain(first.input), plain(second.input))}
        label="Difference of the questions" />`}<//>`}<//><//>`;
}

/** What a run was worth, and its version. */
function Worth({ id }) {
  const { data } = useData(url`/v1/runs/${id}`);
  return data && html`<span class="small">${data.outcome.source ? `outcome ${worth(data.outcome)}` : "not judged"}
    ${data.version && ` · version ${data.version}`}</span>`;
}

const Side = ({ name, run }) => html`<section class="panel side" aria-label=${name}>
  <p class="small soft">${name}</p>
  <p><${Link} path=${["runs", run.id]}>${run.agent ?? run.graph}<//> <${Status} value=${run.status} /> <${Worth}
    id=${run.id} /></p>
  <p class="small soft"><span class="mono">${run.id}</span> <${Copy} text=${run.id} label="Copy id" /> made <${Time}
    at=${run.created_at} /></p>
</section>`;
