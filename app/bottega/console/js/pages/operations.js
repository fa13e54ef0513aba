/** For who keeps it running: scheduler, providers, keys, audit, schedules, webhooks. */
import { useState } from "preact/hooks";

import { call, get, post, url, withQuery } from "../api.js";
import { WAITS_FOR } from "../en.js";
import { count, duration, exact, excerpt, shortId } from "../format.js";
import { SchemaForm } from "../forms/schema_form.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Providers } from "../operations/providers.js";
import { Button, chosenOf, Copy, Empty, Figure, Figures, Folded, Link, Loaded, Panel, permitted, Read,
  Status, Tabs, Time, Value } from "../parts/basics.js";
import { Act, Confirmed, filtersOf, Pages, Rows, Sending, } from "../parts/lists.js";
import { may } from "../person.js";
import { follow, go } from "../router.js";
import { causeOf } from "../run/diagnosis.js";

const VIEWS = {
  scheduler: Scheduler, providers: Providers, keys: Keys, secrets: Secrets, schedules: Schedules,
  webhooks: Webhooks, audit: Audit,
};
const TABS = [["scheduler", "Scheduler"], ["providers", "Providers"], ["keys", "Keys", "admin"],
  ["secrets", "Secrets"], ["schedules", "Schedules"], ["webhooks", "Webhooks"], ["audit", "Audit", "admin"]];

export function Operations({ id, query }) {
  const tabs = permitted(TABS);
  const chosen = chosenOf(TABS, id);
  return html`<div class="head"><h1>Operations</h1></div>
    <${Tabs} tabs=${tabs} chosen=${chosen} onChoose=${(name) => go(["operations", name])} label="Parts of operations" />
    <div role="tabpanel" aria-label=${new Map(tabs).get(chosen)} class="stacked"><${VIEWS[chosen]} query=${query} />
      </div>`;
}

function Audit({ query }) {
  const { field } = filtersOf(["operations", "audit"], query);
  const path = withQuery("/v1/audit", { order: "desc", action: query.action });
  const target = (text) => (text.length === 36 ? shortId(text) : excerpt(text, 60));
  return html`<${Panel} title="Audit log" actions=${field("action", "Action", { kind: "inline",
    placeholder: "any, such as run.cancel" })}>
    <${Pages} key=${path} path=${path} what="the audit log" isSaved>${(entries) => html`<${Rows} label="Audit log"
      head=${["When", "Who", "Action", "What", "Details"]} items=${entries} empty="Nothing is noted yet."
      cells=${(each) => [html`<${Time} at=${each.at} />`, html`<span class="mono small">${each.actor}</span>`,
        each.action, html`<span class="mono small" title=${each.target}>${target(each.target)}</span>`,
        Object.keys(each.details).length ? excerpt(JSON.stringify(each.details), 120) : "–"]} />`}<//><//>`;
}

function Schedules() {
  const [postOnce] = usePostOnce();
  const [version, setVersion] = useState(0);
  const [edited, setEdited] = useState(null);
  const make = async (form) => {
    const { name, cron, timezone, agent, input } = Object.fromEntries(form);
    await postOnce("/v1/schedules", { name, cron, timezone: timezone || "UTC", run: { agent, input } });
    setVersion((n) => n + 1);
  };
  const path = (each) => url`/v1/schedules/${each.name}`;
  return html`<${Panel} title="Schedules"><${Pages} key=${version} path="/v1/schedules" what="schedules"
    everyMs=${10_000}>${(schedules, reload) => html`<${Rows} label="Schedules" items=${schedules}
      id=${({ name }) => name} empty="No run is scheduled." head=${["Name", "When", "Starts", "Next", "Last", ""]}
      cells=${(each) => [each.name, html`<code>${each.cron}</code> <span class="small soft">${each.timezone}</span>`,
        each.run.agent ?? each.run.graph, each.paused ? "paused" : html`<${Starts} key=${each.next_at}
          schedule=${each} />`, html`${each.last_run_id ? html`<${Link} path=${["runs", each.last_run_id]}><${Time}
          at=${each.last_at} /><//>` : "–"}${each.last_error && html`<p class="small bad-text">
          ${each.last_error.message}</p>`}`, html`<span class="actions"><${Act} needs="run" kind="small" label="Run now"
          act=${() => follow(get(path(each)).then(({ run }) => post("/v1/runs", run)), ({ id }) => ["runs", id])} />
          <${Act} needs="define" kind="small" label="Edit" act=${async () => setEdited(await get(path(each)))} />
          <${Act} needs="define" kind="small" label=${each.paused ? "Go on" : "Pause"}
            act=${async () => (await call("PATCH", path(each), { paused: !each.paused }), reload())} />
          <${Confirmed} needs="define" label="Delete" question=${`Delete ${each.name}?`}
            act=${async () => (await call("DELETE", path(each)), reload())} /></span>`]} />`}<//><//>
    ${edited && html`<${Change} key=${edited.name} schedule=${edited} onDone=${() => {
      setEdited(null);
      setVersion((n) => n + 1);
    }} />`}
    <${Panel} title="Make a schedule" needs="define"><${Sending} label="Create" send=${make}>
      <label>Name <input name="name" required /></label>
      <label>Cron: minute, hour, day, month, weekday <input name="cron" required placeholder="0 8 * * 1-5" class="mono"
        /></label>
      <label>Time zone <input name="timezone" placeholder="UTC" /></label>
      <label>Agent <input name="agent" required /></label>
      <label>Question <textarea name="input" rows="3" required></textarea></label><//><//>`;
}

/** The next start; unfolded, the next five. */
const Starts = ({ schedule }) => html`<${Folded} summary=${html`<${Time} at=${schedule.next_at} />`}>${() => html`
  <${Read} path=${url`/v1/schedules/${schedule.name}`} what="its next starts">${({ next_starts: starts }) => html`
    <ol class="small" aria-label=${`Next starts of ${schedule.name}`}>${starts.map((at) => html`<li key=${at}>
      ${exact(at)}</li>`)}</ol>`}<//>`}<//>`;

/** Change a schedule, in the fields that the API has for it. */
const Change = ({ schedule: { name, cron, timezone, paused, run }, onDone }) => html`<${Panel}
  title=${`Change ${name}`}><${SchemaForm} schema="ScheduleContent" value=${{ cron, timezone, paused, run }}
  label="Save" onCancel=${onDone}
  send=${(draft) => call("PUT", url`/v1/schedules/${name}`, draft).then(onDone)} /><//>`;

const SHOWN = { pending: "pending", delivered: "completed", failed: "failed" };

const keyOf = (each) => `${each.run_id}:${each.seq}`;

function Webhooks({ query }) {
  const { choice } = filtersOf(["operations", "webhooks"], query);
  const path = withQuery("/v1/webhook-deliveries", { order: "desc", status: query.status });
  return html`<${Panel} title="Deliveries" actions=${choice("status", "Status", Object.keys(SHOWN),
    { kind: "inline" })}><${Pages} key=${path} path=${path} what="deliveries" isSaved everyMs=${5000}>
    ${(items) => html`<${Rows} label="Deliveries of webhooks" items=${items} id=${keyOf}
      empty="No webhook was asked for." hint=${html`<p>A run with <code>webhook_url</code> is told of at its end.</p>`}
      head=${["Run", "Event", "To", "Status", "#Tries", "Last answer", "Next try"]} cells=${(each) => [
        html`<${Link} path=${["runs", each.run_id]} class="mono">${each.run_id.slice(0, 8)}…<//>`, each.event, each.url,
        html`<${Status} value=${SHOWN[each.status]} />`, each.tries, each.answer ?? each.error ?? "–",
        each.status === "pending" && each.next_at ? html`<${Time} at=${each.next_at} />`
          : each.ended_at ? html`ended <${Time} at=${each.ended_at} />` : "–"]} />`}<//>
    <p class="small soft body">A delivery that does not arrive is tried again by itself. One that failed is not sent any
      more: its receiver can read the run.</p><//>
    ${may("admin") && html`<${SigningSecrets} />`}`;
}

function SigningSecrets() {
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

const SCOPES = { read: "sees everything", run: "starts and cancels runs", define: "changes agents and graphs",
  approve: "decides on approvals", admin: "everything, keys too" };

/** Scopes that often go together. */
const PRESETS = { "a program that asks agents": ["run"], "a person who approves": ["approve"],
  "a deployment": ["define"], "a person who builds": ["run", "define"], "an administrator": ["admin"] };

/** Choose the scopes of a preset in the form of the button. */
const choose = (event, scopes) => {
  for (const box of event.currentTarget.form.elements.scope) box.checked = scopes.includes(box.value);
};

function Keys() {
  const [made, setMade] = useState(null);
  const [version, setVersion] = useState(0);
  const make = async (form) => {
    setMade(await post("/v1/keys", { name: form.get("name"), scopes: form.getAll("scope") }));
    setVersion((n) => n + 1);
  };
  const state = (key) => (key.revoked_at ? html`revoked <${Time} at=${key.revoked_at}
    />` : key.expires_at ? html`until <${Time} at=${key.expires_at} />` : "valid");
  return html`
    <${Panel} title="API keys"><${Pages} key=${version} path="/v1/keys?order=desc" what="keys">
      ${(keys, reload) => html`<${Rows} label="API keys" items=${keys}
      empty="There is no key: only this machine can use the server."
      hint=${html`<p>From the first key on, every request needs one.</p>`}
      head=${["Name", "Prefix", "Scopes", "Made", "Last used", "State", ""]} cells=${(each) => [each.name,
        html`<span class="mono">${each.prefix}</span>`, each.scopes.join(", "), html`<${Time} at=${each.created_at} />`,
        html`<${Time} at=${each.last_used_at} />`, state(each), !each.revoked_at && html`<${Confirmed} label="Revoke"
          question=${`Revoke ${each.name}? Its programs stop working.`}
          act=${async () => (await call("DELETE", url`/v1/keys/${each.id}`), reload())} />`]} />`}<//><//>
    <${Panel} title="Make a key">
      ${made && html`<div class="state" role="status"><p><strong>The key ${made.name}. It is shown only now.</strong>
        </p><${Value} value=${made.key} /><${Copy} text=${made.key} label="Copy the key" /></div>`}
      <${Sending} label="Create" send=${make}>
        <label>Name <input name="name" required maxlength="100" /></label>
        <div class="actions"><span class="small soft">For</span>${Object.entries(PRESETS).map(([words, scopes]) => html`
          <${Button} kind="small" onClick=${(e) => choose(e, scopes)}>${words}<//>`)}</div>
        <fieldset class="choices"><legend>Scopes</legend>${Object.entries(SCOPES).map(([scope, means]) => html`<label
          class="check"><input type="checkbox" name="scope" value=${scope} defaultChecked=${scope === "run"}
            /> ${scope}: ${means}</label>`)}</fieldset>
      <//><//>`;
}

function Secrets() {
  const [version, setVersion] = useState(0);
  const store = async (form) => {
    const hosts = form.get("hosts").split(/[\s,]+/).filter(Boolean);
    await call("PUT", url`/v1/secrets/${form.get("name")}`, { value: form.get("value"), hosts });
    setVersion((n) => n + 1);
  };
  return html`<${Panel} title="Secrets that tools and providers send"><${Pages} key=${version} path="/v1/secrets"
    what="secrets">${(secrets, reload) => html`<${Rows} label="Secrets" items=${secrets} id=${({ name }) => name}
      empty="No secret is stored." head=${["Name", "Only to", "#Version", "Changed", ""]} cells=${(each) => [
        html`<span class="mono">${each.name}</span>`, each.hosts.join(", "), each.version,
        html`<${Time} at=${each.updated_at} />`, html`<${Confirmed} needs="define" label="Delete"
          question=${`Delete ${each.name}? What sends it fails.`}
          act=${async () => (await call("DELETE", url`/v1/secrets/${each.name}`), reload())} />`]} />`}<//><//>
    <${Panel} title="Store a secret" needs="define">
      <p class="small soft body">Its value is never shown again. Under a name that exists it is the next version.</p>
      <${Sending} label="Save" send=${store}>
      <label>Name <input name="name" required /></label>
      <label>Hosts that may get it <input name="hosts" required placeholder="api.example.com" /></label>
      <label>Value <input name="value" type="password" autocomplete="off" required /></label><//><//>`;
}

const EVERY_MS = 2000;
const sum = (items, of) => items.reduce((total, each) => total + of(each), 0);

function Scheduler() {
  return html`<${Read} path="/v1/scheduler" what="workers" everyMs=${EVERY_MS}>
  ${({ workers, runs, waiting, quotas }) => html`
    <${Figures}>
      <${Figure} name="Workers" value=${count(workers.length)} />
      <${Figure} name="Runs under way" value=${count(sum(workers, (each) => each.pool.runs))} />
      <${Figure} name="Task slots busy" value=${count(sum(workers, (each) => each.pool.busy))}
        note=${`of ${count(sum(workers, (each) => each.pool.size))}`} />
      <${Figure} name="Tasks waiting for a slot" value=${count(sum(workers, (each) => each.pool.queued))}
        note=${`${count(sum(workers, (each) => each.tenant.queued))} of them yours`} />
      <${Figure} name="Parked tasks" value=${count(sum(workers, (each) => each.pool.parked))}
        note="they wait for other tasks" />
    <//>
    <div class="columns"><${Panel} title="Queued runs"><${Queue} rows=${runs} /><//>
      <${Panel} title="Limits"><${Limits} quotas=${quotas} /><//></div>
    <${Panel} title="Waiting runs"><${Waiting} rows=${waiting} /><//>
    <${Panel} title="Workers"><${Rows} label="Workers" items=${workers} empty="No worker is up: runs wait."
      hint=${html`<p>Start one with <code>bottega worker</code>.</p>`} head=${["Worker", "Up since", "Last seen",
        "#Runs", "#Slots busy", "#Waiting", "#Parked", "Your sub-agents held back"]} cells=${({ pool, ...each }) => [
        html`<span class="mono small">${each.id}</span>`, html`<${Time} at=${each.started_at} />`,
        html`<${Time} at=${each.seen_at} />`, count(pool.runs), `${count(pool.busy)} of ${count(pool.size)}`,
        count(pool.queued), count(pool.parked), each.tenant.breakers.map((breaker) => html`<p class="small bad-text">
          ${breaker.agent} in run <span class="mono">${breaker.run_id}</span>: no task starts after${" "}
          ${count(breaker.failures)} failures in a row${breaker.retry_after_ms == null ? "; one is tried now"
            : `; one is tried in ${duration(breaker.retry_after_ms)}`}</p>`)]} /><//>`}<//>`;
}

const Waiting = ({ rows }) => html`<${Rows} label="Waiting runs" items=${rows}
  empty="No run waits for a model, people or other runs." head=${["For", "Agent", "#Runs", "The first since", "Why"]}
  id=${(each) => `${each.reason} ${each.agent}`} cells=${(each) => [html`<${Link} path=${["runs"]}
    query=${{ waiting_for: each.reason }}>${WAITS_FOR[each.reason]}<//>`, each.agent, count(each.runs),
    html`<${Time} at=${each.oldest_at} />`, causeOf(each.error) || "–"]} />`;

const Queue = ({ rows }) => html`<${Rows} label="Queued runs by priority" items=${rows} empty="No run is queued."
  head=${["Priority", "Runs", "#Number", "The oldest waits since"]} id=${({ priority }) => priority}
  cells=${(each) => [each.priority, html`<${Meter} of=${each.queued}
    most=${Math.max(...rows.map(({ queued }) => queued))} />`, count(each.queued),
    html`<${Time} at=${each.oldest_at} />`]} />`;

const QUOTAS = { concurrent_runs: "Runs at once", queued_runs: "Queued runs", tokens_per_day: "Tokens today (UTC)",
  cost_per_day: "Cost today (UTC), USD", storage_bytes: "Stored, in bytes" };

const Limits = ({ quotas }) => html`<${Rows} label="Limits" items=${quotas} id=${({ name }) => name}
  head=${["Limit", "Used", "#Number"]} cells=${(each) => [QUOTAS[each.name] ?? each.name,
    each.limit && html`<${Meter} of=${Number(each.used)} most=${Number(each.limit)} />`,
    each.limit == null ? `${Number(each.used) ? `${amount(each, each.used)}, ` : ""}no limit`
      : `${amount(each, each.used)} of ${amount(each, each.limit)}`]} />`;

const amount = (quota, value) => (quota.name === "cost_per_day" ? Number(value).toFixed(2) : count(Number(value)));

const Meter = ({ of, most }) =>
  html`<span class="stack wide-cell" aria-hidden="true">
    <i class="bar model" style=${{ width: `${Math.min(100, (100 * of) / Math.max(1e-9, most))}%` }}></i></span>`;
