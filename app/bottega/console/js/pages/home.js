/** What runs now, what waits for a person, what failed last, and what today cost. */
import { useEffect, useRef, useState } from "preact/hooks";

import { ROOT, withQuery } from "../api.js";
import { LABEL_SOURCES } from "../en.js";
import { count, excerpt, money, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Copy, Empty, Failure, Figure, Figures, Link, Loaded, Panel, Time, Value } from "../parts/basics.js";
import { RunTable, titleOf } from "../parts/run_table.js";
import { may } from "../person.js";
import { follow, to } from "../router.js";
import { causeOf } from "../run/diagnosis.js";
import { NextSteps } from "../setup/next.js";

const EVERY_MS = 5000, PART_EVERY_MS = 10_000, BAD_EVERY_MS = 60_000, DAY_MS = 86_400_000;
/** What the demo calls its own agents, and the team that it starts first. */
const DEMO = { mark: "bottega demo", run: { agent: "coordinator", graph: "software", user: "me",
  input: "Build a todo app." } };
const FIRST = `curl -s ${location.origin}${ROOT}/v1/agents -H 'content-type: application/json' \\
  -d '{"name": "helper", "system_message": "You answer in one sentence."}'
curl -s "${location.origin}${ROOT}/v1/runs?wait=60" -H 'content-type: application/json' \\
  -d '{"agent": "helper", "user": "me", "input": "What is a bottega?"}'`;

const recent = (status, limit = 6) => withQuery("/v1/runs", { status, limit, order: "desc" });

/**
 * Read what a page shows again when the latest runs are other ones, or in another state; else one part after the
 * other, so that a page at rest asks for little.
 */
function useChanges(latest, parts) {
  const state = JSON.stringify(latest.data?.items.map(({ id, status }) => [id, status]));
  const kept = useRef({ state, parts, turn: 0 });
  kept.current.parts = parts;
  useEffect(() => {
    const isFirst = kept.current.state === undefined;
    kept.current.state = state;
    if (!isFirst) for (const each of parts) each.reload();
  }, [state]);
  useEffect(() => {
    const timer = setInterval(() => {
      const { parts: all, turn } = kept.current;
      kept.current.turn = turn + 1;
      if (document.visibilityState === "visible") all[turn % all.length].reload();
    }, PART_EVERY_MS);
    return () => clearInterval(timer);
  }, []);
}

export function Home() {
  const running = useData(recent("running"));
  const queued = useData(recent("queued"));
  const failed = useData(recent("failed", 50));
  const day = new Date(Date.now() - DAY_MS).toISOString().slice(0, 13);
  const bad = useData(withQuery("/v1/runs", { status: "completed", outcome: "FAILURE", limit: 50, order: "desc",
    created_after: `${day}:00:00Z` }), { everyMs: BAD_EVERY_MS });
  const last = useData(withQuery("/v1/runs", { limit: 6, order: "desc" }), { everyMs: EVERY_MS });
  const waits = useData("/v1/interrupts?status=pending&limit=100");
  const reads = may("read");
  const usage = useData(reads ? "/v1/usage?by=day&limit=1&order=desc" : null);
  const scheduler = useData(reads ? "/v1/scheduler" : null);
  useChanges(last, [running, queued, failed, waits, ...(reads ? [usage, scheduler] : [])]);
  const today = usage.data?.items[0];
  const isToday = today?.day === new Date().toISOString().slice(0, 10);
  const none = (nothing) => (usage.data ? nothing : "–"); // it is not known before it was read
  const workers = scheduler.data?.workers ?? [];
  const slots = workers.reduce((sum, each) => sum + each.pool.size, 0);
  const busy = workers.reduce((sum, each) => sum + each.pool.busy, 0);
  const full = scheduler.data?.quotas.find(({ name, used, limit }) => name === "queued_runs" && limit != null
    && Number(used) >= limit);
  const atLeast = (page) => (page ? `${page.items.length}${page.next_cursor ? "+" : ""}` : "–");
  return html`
    <div class="head"><h1>Home</h1><div class="actions">${may("run") && html`<${Demo} />`}</div></div>
    <${NextSteps} hasRun=${last.data && last.data.items.length > 0} />
    <${Figures}>
      <${Figure} name="Running" value=${atLeast(running.data)} href=${to(["runs"], { status: "running" })} />
      <${Figure} name="Queued" value=${atLeast(queued.data)} href=${to(["runs"], { status: "queued" })} />
      <${Figure} name="Waiting for people" value=${atLeast(waits.data)} href=${to(["approvals"])} />
      ${reads && html`<${Figure} name="Workers" value=${scheduler.data ? count(workers.length) : "–"}
        note=${scheduler.data && `${count(busy)} of ${count(slots)} task slots busy`} />`}
      ${reads && html`<${Figure} name="Tokens today (UTC)" value=${isToday ? tokens(today.input + today.output)
        : none("0")} />
        <${Figure} name="Cost today (UTC)" value=${isToday ? money(today.cost) : none("0.00 USD")} />`}
    <//>
    ${full && html`<p class="note bad" role="alert">The queue is full: ${count(Number(full.used))} of
      ${count(Number(full.limit))} runs wait, and new ones are refused. <${Link}
        path=${["operations"]}>Workers and queue<//></p>`}
    ${scheduler.data && !workers.length && html`<p class="note bad"
      role="alert">No worker is up: runs wait. Start one with <code>bottega worker</code>.</p>`}
    <div class="columns">
      <${Panel} title="Waiting for people" actions=${html`<${Link} path=${["approvals"]}>All<//>`}>
        <${Loaded} from=${waits} what="decisions">${(page) => page.items.length
          ? html`<ul class="rows">${page.items.slice(0, 6).map((each) => html`<li>
            <${Link} path=${["approvals"]} query=${{ id: each.id }}>${each.agent}<//> ${each.kind === "question"
              ? excerpt(each.question, 90)
              : html`asks for <code>${excerpt(`${each.tool} ${JSON.stringify(each.arguments ?? {})}`, 90)}</code>`}
            <span class="small soft">${each.user && ` for ${each.user}`}</span></li>`)}</ul>`
          : html`<${Empty} title="Nobody waits for you." />`}<//>
      <//>
      <${Panel} title="Failed last" actions=${html`<${Link} path=${["runs"]} query=${{ status: "failed" }}>All<//>`}>
        <${Loaded} from=${failed} what="failed runs">${(page) => page.items.length || bad.data?.items.length
          ? html`<${Causes} runs=${[...page.items, ...(bad.data?.items ?? [])].sort(byEnd)} />`
          : html`<${Empty} title="No run has failed." />`}<//>
      <//>
    </div>
    <${Panel} title="Latest runs" actions=${html`<${Link} path=${["runs"]}>All<//>`}>
      <${Loaded} from=${last} what="runs">${(page) => page.items.length
        ? html`<${RunTable} runs=${page.items} />`
        : may("define") ? html`<${FirstMinute} />` : html`<${Empty} title="Nothing has run yet." />`}<//>
    <//>`;
}

const byEnd = (a, b) => (a.ended_at < b.ended_at ? 1 : -1);

/** What went wrong with a run that failed, or that somebody judged. */
const whyOf = ({ error, agent, graph, outcome }) => (error ? causeOf(error)
  : `${agent ?? graph} went badly, by ${LABEL_SOURCES[outcome.source] ?? "its status"}`);

/** Failed runs and those that went badly, newest first, together with those that failed alike. */
function Causes({ runs }) {
  const groups = new Map();
  for (const run of runs) groups.set(whyOf(run), [...(groups.get(whyOf(run)) ?? []), run]);
  return html`<ul class="rows">${[...groups].slice(0, 6).map(([cause, alike]) => html`<li key=${cause}>
    <span class="bad-text">${cause}</span>
    <p class="small"><${Link} path=${["runs", alike[0].id]}>${titleOf(alike[0], 60)}<//>
      <span class="soft"> ${alike[0].agent ?? alike[0].graph} · <${Time} at=${alike[0].ended_at} />
        ${alike.length > 1
          && html` · ${count(alike.length)} runs since <${Time} at=${alike.at(-1).ended_at} />`}</span>
          </p>
  </li>`)}</ul>`;
}

/** What to do on an installation on which nothing has run. */
const FirstMinute = () => html`<${Empty} title="Nothing has run yet.">
  <p>Define an agent and start a run:</p><${Value} value=${FIRST} /><${Copy} text=${FIRST} label="Copy the commands" />
  <p>Or start a team that is there already, on a server of its own:</p><${Value} value="bottega demo --keep" /><${Copy}
    text="bottega demo --keep" label="Copy the command" /><//>`;

/** Start the demo's team, if its agents are here, and show its run. */
function Demo() {
  const [postOnce] = usePostOnce();
  const lead = useData("/v1/agents?limit=100");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const isHere = lead.data?.items.some((each) => each.name === DEMO.run.agent
    && each.metadata?.created_by === DEMO.mark);
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      await follow(postOnce("/v1/runs", DEMO.run), ({ id }) => ["runs", id]);
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  return isHere && html`<${Button} kind="primary" busy=${busy} onClick=${start}>Start the demo's team<//>
    ${error && html`<${Failure} error=${error} />`}`;
}
