/** What agents wait for people to decide. */
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel } from "../parts/basics.js";
import { Decision } from "../parts/decision.js";

export function Interrupts() {
  const open = useData("/v1/interrupts?status=pending&limit=100", { everyMs: 3000 });
  return html`
    <div class="head"><h1>Waiting for you</h1></div>
    <${Panel}>
      <${Loaded} from=${open} what="decisions">${(page) => page.items.length
        ? page.items.map((each) => html`<div key=${each.id} class="asked">
            <p class="small soft"><${Link} path=${["runs", each.run_id]}>The run<//>${each.session_id && ` of session ${each.session_id}`}</p>
            <${Decision} interrupt=${each} onDone=${open.reload} /></div>`)
        : html`<${Empty} title="Nobody waits for you."><p>Agents ask here before a call that needs approval, and when they have a question.</p><//>`}<//>
    <//>`;
}
