/** What agents wait for people to decide. */
import { html } from "../html.js";
import { Empty, Link, Panel } from "../parts/basics.js";
import { Decision } from "../parts/decision.js";
import { Pages } from "../parts/lists.js";

export function Interrupts() {
  return html`
    <div class="head"><h1>Waiting for you</h1></div>
    <${Panel}>
      <${Pages} path="/v1/interrupts?status=pending" what="decisions" everyMs=${3000}>${(items, reload) => items.length
        ? items.map((each) => html`<div key=${each.id} class="asked">
            <p class="small soft"><${Link} path=${["runs", each.run_id]}>The run<//>${each.session_id && ` of session ${each.session_id}`}</p>
            <${Decision} interrupt=${each} onDone=${reload} /></div>`)
        : html`<${Empty} title="Nobody waits for you."><p>Agents ask here before a call that needs approval, and when they have a question.</p><//>`}<//>
    <//>`;
}
