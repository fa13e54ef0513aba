/** Webhooks: what was sent, what failed, and the secrets that sign them. */
import { useState } from "preact/hooks";

import { post, withQuery } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Copy, Empty, Link, Loaded, Panel, Status, Time, Value } from "../parts/basics.js";
import { Confirmed, Pages, Table } from "../parts/lists.js";
import { may } from "../person.js";
import { go } from "../router.js";

const SHOWN = { pending: "pending", delivered: "completed", failed: "failed" };

const keyOf = (each) => `${each.run_id}:${each.seq}`;

export function Webhooks({ query }) {
  const status = query.status ?? "";
  const choose = (value) => go(["operations", "webhooks"], { ...query, status: value }, { replace: true });
  const path = withQuery("/v1/webhook-deliveries", { order: "desc", status });
  return html`<${Panel} title="Deliveries" actions=${html`<label class="inline">Status <select value=${status}
    onChange=${(e) => choose(e.target.value)}><option value="">any</option>
      ${Object.keys(SHOWN).map((each) => html`<option>${each}</option>`)}</select></label>`}>
    <${Pages} key=${path} path=${path} what="deliveries" isSaved everyMs=${5000}>${(items) => items.length
      ? html`<${Table} label="Deliveries of webhooks" head=${["Run", "Event", "To", "Status", "#Tries", "Last answer",
        "Next try"]}>${items.map((each) => html`<tr key=${keyOf(each)}>
        <td><${Link} path=${["runs", each.run_id]} class="mono">${each.run_id.slice(0, 8)}…<//></td><td>${each.event}
          </td><td class="small">${each.url}</td><td><${Status} value=${SHOWN[each.status]} /></td><td class="right">
            ${each.tries}</td>
        <td class="small">${each.answer ?? each.error ?? "–"}</td><td>
          ${each.status === "pending" && each.next_at ? html`<${Time} at=${each.next_at}
            />` : each.ended_at ? html`ended <${Time} at=${each.ended_at} />` : "–"}</td></tr>`)}<//>`
      : html`<${Empty} title="No webhook was asked for.">
        <p>A run with <code>webhook_url</code> is told of at its end.</p><//>`}<//>
    <p class="small soft body">A delivery that does not arrive is tried again by itself. One that failed is not sent any
      more: its receiver can read the run.</p><//>
    ${may("admin") && html`<${Secrets} />`}`;
}

function Secrets() {
  const found = useData("/v1/webhook-secret");
  const [made, setMade] = useState(null);
  const rotate = async () => {
    setMade(await post("/v1/webhook-secret"));
    found.reload();
  };
  return html`<${Panel} title="Secrets that sign webhooks" actions=${html`<${Confirmed} label="Make the next one"
    kind="small" question="The present one signs for a day more." act=${rotate} />`}>
    ${made && html`<div class="state" role="status"><p><strong>The new secret. It is shown only now.</strong></p>
      <${Value} value=${made.secret} /><${Copy} text=${made.secret} label="Copy the secret" /></div>`}
    <${Loaded} from=${found} what="secrets">${({ items }) => items.length
      ? html`<ul class="rows">${items.map((each) => html`<li key=${each.id}><code>${each.id ?? "of the server"}
        </code> ${each.created_at && html`made <${Time} at=${each.created_at}
          />`}${each.expires_at && html`, signs until <${Time} at=${each.expires_at} />`}</li>`)}</ul>`
      : html`<${Empty} title="There is none: webhooks cannot be signed, and runs with one are refused." />`}<//><//>`;
}
