/** What agents wait for people to decide, worked one after the other: j and k go on, a, d and e decide. */
import { useEffect, useRef } from "preact/hooks";

import { url, withQuery } from "../api.js";
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { factsOf } from "../parts/approval_facts.js";
import { Button, Empty, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Decision, isForPage } from "../parts/decision.js";
import { usePages } from "../parts/lists.js";
import { go } from "../router.js";

const EVERY_MS = 3000;
const SHOWN_MESSAGES = 5;
const MOST = 200;

export function Approvals({ query }) {
  const found = usePages("/v1/interrupts?status=pending", { everyMs: EVERY_MS });
  const others = useData(withQuery("/v1/interrupts", { order: "desc", limit: MOST }), { everyMs: EVERY_MS });
  return html`
    <div class="head"><h1>Approvals</h1><p class="small soft">Keys: <kbd>j</kbd> next, <kbd>k</kbd> before,${" "}
      <kbd>a</kbd> approve, <kbd>d</kbd> deny, <kbd>e</kbd> edit</p></div>
    <${Loaded} from=${found} what="decisions">${(page) => page.items.length
      ? html`<${Inbox} found=${found} chosen=${query.id} others=${others.data?.items ?? []} />`
      : html`<${Panel}><${Empty} title="Nobody waits for you.">
          <p>Agents ask here before a call that needs approval, and when they have a question.</p><//><//>`}<//>`;
}

function Inbox({ found, chosen, others }) {
  const { items, next_cursor: more } = found.data;
  const at = Math.max(0, items.findIndex((each) => each.id === chosen));
  const asked = items[at];
  const choose = (number) => items[number] && go(["approvals"], { id: items[number].id }, { replace: true });
  const list = useRef(null);
  useEffect(() => list.current.querySelector(".chosen")?.scrollIntoView({ block: "nearest" }), [asked.id]);
  useEffect(() => {
    const onKeyDown = (event) => {
      const step = { j: 1, k: -1 }[event.key];
      if (step && isForPage(event)) choose(at + step);
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  });
  const onDone = () => {
    choose(at + 1 < items.length ? at + 1 : at - 1);
    found.reload();
  };
  return html`<div class="inbox">
    <${Panel}><ul class="rows" ref=${list}>${items.map((each) => html`<li key=${each.id}
        class=${each.id === asked.id ? "chosen" : ""}>
      <${Link} path=${["approvals"]} query=${{ id: each.id }} aria-current=${each.id === asked.id ? "true" : null}>
        ${each.kind === "question" ? excerpt(each.question, 80) : each.tool}<//>
      <p class="small soft">${each.user ?? "nobody"} · ${excerpt(worth(each), 60)} ·${" "}
        <${Time} at=${each.created_at} /></p>
    </li>`)}</ul>
      ${more && html`<div class="body"><${Button} onClick=${found.more}>Show more<//></div>`}<//>
    <${One} key=${asked.id} asked=${asked} others=${others} onDone=${onDone} />
  </div>`;
}

/** The arguments in one line. */
const worth = ({ arguments: given }) => Object.values(given ?? {}).map(plain).join(" · ");

function One({ asked, others, onDone }) {
  const found = useData(withQuery(url`/v1/runs/${asked.run_id}/messages`, { order: "desc", limit: MOST }));
  const said = (found.data?.items ?? []).filter(({ role, content, parts }) =>
    ["user", "assistant"].includes(role) && (content || parts?.length));
  const text = found.data && said.map((each) => plain(each.content)).join("\n");
  const isBefore = ({ status, tool, user }) => status === "resolved" && tool === asked.tool && user === asked.user;
  const before = others.filter(isBefore);
  return html`<div class="stacked">
    <${Panel} title=${asked.user ? `Asked by ${asked.user}` : "Asked by nobody named"}
      actions=${html`<${Link} path=${["runs", asked.run_id]}>The run<//>`}>
      <${Loaded} from=${found} what="what was said">${() => html`<div class="body">
        ${said.slice(0, SHOWN_MESSAGES).reverse().map((each) => html`<div key=${each.seq} class=${`said ${each.role}`}>
          <pre class="text">${plain(each.content)}</pre></div>`)}
        ${!said.length && html`<p class="soft">Nothing was said.</p>`}</div>`}<//><//>
    <${Panel} kind="asked-now">
      <${Decision} interrupt=${asked} facts=${factsOf(asked, text, others)} byKey onDone=${onDone} /><//>
    ${before.length > 0 && html`<${Panel} title=${`Decided before for ${asked.user ?? "nobody"}`}>
      <ul class="rows">${before.slice(0, 5).map((each) => html`<li key=${each.id}>
        ${each.resolution?.decision === "deny" ? "denied" : "approved"}: <code>${excerpt(worth(each), 80)}</code>
        <span class="small soft"> ${each.resolved_by?.name ?? ""} <${Time} at=${each.resolved_at} /></span>
        ${each.resolution?.comment && html`<p class="small">${each.resolution.comment}</p>`}</li>`)}</ul><//>`}
  </div>`;
}
