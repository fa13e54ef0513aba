/** Active runs, calls that wait for a person, the last failures, and today's cost. */
import { useEffect, useRef } from "preact/hooks";

import { get, url, withQuery } from "../api.js";
import { brokenOf } from "../figures/rates.js";
import { clock, count, excerpt, money, tokens } from "../format.js";
import { modelWaits } from "../health/queue.js";
import { html } from "../html.js";
import { pending, useData } from "../load.js";
import { Button, Empty, Failure, Figure, Figures, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { RunTable, titleOf } from "../parts/run_table.js";
import { timesOf } from "../parts/series.js";
import { waitingForModel, Warnings } from "../parts/waits.js";
import { useWork } from "../parts/work.js";
import { may } from "../person.js";
import { follow, to } from "../router.js";
import { causeOf, judgedOf } from "../run/diagnosis.js";
import { NextSteps } from "../setup/next.js";

const EVERY_MS = 5000, SCHEDULER_EVERY_MS = 10_000, COUNTS_EVERY_MS = 30_000, BAD_EVERY_MS = 60_000;
const BROKEN_EVERY_MS = 65_000, DAY_MS = 86_400_000;
/** Names of the demo's agents, and the demo's first team. */
const DEMO = { mark: "bottega demo", run: { agent: "coordinator", graph: "software", user: "me",
  input: "Build a todo app." } };

const recent = (status, limit = 6) => withQuery("/v1/runs", { status, limit, order: "desc" });

/** Read parts of a page again when the latest runs, the scheduler's figures or the waiting calls change. */
function useChanges(last, scheduler, parts) {
  const { quotas, runs, waiting } = scheduler.data ?? {};
  const used = quotas?.filter(({ name }) => name !== "storage_bytes"); // which are counted later
  const state = JSON.stringify([last.data?.items.map(({ id, status }) => [id, status]), used, runs, waiting,
    pending.value.data?.items.map(({ id }) => id)]);
  const isFirst = useRef(true);
  useEffect(() => {
    if (isFirst.current) isFirst.current = !last.data;
    else for (const each of parts) each.reload();
  }, [state]);
}

/** The number of runs in a state: from the scheduler, which is exact, or from a list of runs. */
function useNumber(status, scheduler, number) {
  const listed = useData(may("read") ? null : recent(status), { everyMs: COUNTS_EVERY_MS });
  return scheduler.data ? count(number(scheduler.data)) : atLeast(listed.data);
}

const underWay = ({ quotas }) => Number(quotas.find(({ name }) => name === "concurrent_runs").used);
const queued = ({ runs }) => runs.reduce((sum, each) => sum + each.queued, 0);

const atLeast = (page) => (page ? `${page.items.length}${page.next_cursor ? "+" : ""}` : "–");

export function Home() {
  const reads = may("read");
  const scheduler = useData(reads ? "/v1/scheduler" : null, { everyMs: SCHEDULER_EVERY_MS });
  const runningNow = useNumber("running", scheduler, underWay);
  const queuedNow = useNumber("queued", scheduler, queued);
  const failed = useData(recent("failed", 50));
  const day = new Date(Date.now() - DAY_MS).toISOString().slice(0, 13);
  const bad = useData(withQuery("/v1/runs", { status: "completed", outcome: ["FAILURE", "PARTIAL"], limit: 50,
    order: "desc", created_after: `${day}:00:00Z` }), { everyMs: BAD_EVERY_MS });
  const last = useData(withQuery("/v1/runs", { limit: 6, order: "desc" }), { everyMs: EVERY_MS });
  const waits = pending.value;
  const usage = useData(reads ? "/v1/usage?by=day&limit=1&order=desc" : null);
  useChanges(last, scheduler, [failed, ...(reads ? [usage] : [])]);
  const today = usage.data?.items[0];
  const isToday = today?.day === new Date().toISOString().slice(0, 10);
  const none = (nothing) => (usage.data ? nothing : "–"); // it is not known before it was read
  const workers = scheduler.data?.workers ?? [];
  const taken = workers.reduce((sum, each) => sum + each.pool.runs, 0);
  const forModel = modelWaits(scheduler.data?.waiting ?? []);
  return html`
    <div class="head"><h1>Home</h1><div class="actions">${may("run") && html`<${Demo} />`}</div></div>
    ${reads && html`<${Broken} /><${Warnings} scheduler=${scheduler} />`}
    <${NextSteps} hasRun=${last.data && last.data.items.length > 0} />
    <${Figures}>
      <${Figure} name="Running" value=${runningNow} href=${to(["runs"], { status: "running" })} />
      <${Figure} name="Queued" value=${queuedNow} href=${to(["runs"], { status: "queued" })} />
      ${forModel && html`<${Figure} name="Waiting for a model" value=${count(forModel.runs)}
        href=${to(["runs"], waitingForModel())} />`}
      <${Figure} name="Waiting for people" value=${atLeast(waits.data)} href=${to(["approvals"])} />
      ${reads && html`<${Figure} name="Workers" value=${scheduler.data ? count(workers.length) : "–"}
        note=${scheduler.data && `${count(taken)} runs under way in them`} />`}
      ${reads && html`<${Figure} name="Tokens today (UTC)" value=${isToday ? tokens(today.input + today.output)
        : none("0")} />
        <${Figure} name="Cost today (UTC)" value=${isToday ? money(today.cost) : none("0.00 USD")} />`}
    <//>
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
          ? html`<${Causes} runs=${[...page.items, ...(bad.data?.items ?? [])].sort(byEnd)}
            hasMore=${Boolean(page.next_cursor || bad.data?.next_cursor)} />`
          : html`<${Empty} title="No run has failed." />`}<//>
      <//>
    </div>
    <${Panel} title="Latest runs" actions=${html`<${Link} path=${["runs"]}>All<//>`}>
      <${Loaded} from=${last} what="runs">${(page) => page.items.length
        ? html`<${RunTable} runs=${page.items} />`
        : html`<${Empty} title="Nothing has run yet." />`}<//>
    <//>`;
}

const byEnd = (a, b) => (a.ended_at < b.ended_at ? 1 : -1);

/** The problem of a run that failed, or that somebody judged. */
const whyOf = (run) => (run.error ? causeOf(run.error)
  : `${run.agent ?? run.graph}${run.version ? ` version ${run.version}` : ""} ${excerpt(judgedOf(run), 160)}`);

/**
 * Failed runs and bad runs, the newest first, in groups of similar failures. `hasMore`: true if there are
 * older runs, so that a number is a minimum.
 */
function Causes({ runs, hasMore }) {
  const groups = [...Map.groupBy(runs, whyOf)];
  return html`<ul class="rows">${groups.slice(0, 6).map(([cause, alike]) => html`<li key=${cause}>
    <span class="bad-text">${cause}</span>
    <p class="small"><${Link} path=${["runs", alike[0].id]}>${titleOf(alike[0], 60)}<//>
      <span class="soft"> ${alike[0].agent ?? alike[0].graph} · <${Time} at=${alike[0].ended_at} />
        ${alike.length > 1
          && html` · ${hasMore ? "at least " : ""}${count(alike.length)} runs since <${Time}
            at=${alike.at(-1).ended_at} />`}</span>
          </p>
  </li>`)}</ul>`;
}

/** Start the demo's team, if its agents are here, and show its run. */
function Demo() {
  const lead = useData("/v1/agents?limit=100");
  const { busy, error, work, postOnce } = useWork();
  const isHere = lead.data?.items.some((each) => each.name === DEMO.run.agent
    && each.metadata?.created_by === DEMO.mark);
  const start = () => work(() => follow(postOnce("/v1/runs", DEMO.run), ({ id }) => ["runs", id]));
  return isHere && html`<${Button} kind="primary" busy=${busy} onClick=${start}>Start the demo's team<//>
    ${error && html`<${Failure} error=${error} />`}`;
}

function Broken() {
  const found = useData("/v1/metrics/outcomes", { everyMs: BROKEN_EVERY_MS,
    from: (path) => get(withQuery(path, { by: "version", ...timesOf("7d") })) });
  return brokenOf(found.data?.items ?? []).map((each) => html`<${One} key=${each.agent} ...${each} />`);
}

/** "clerk version 5: 0 of 21 good, version 4: 101 of 104; stored 06:43." Nothing after a newer version is stored. */
function One({ agent, after, before }) {
  const versions = useData(url`/v1/agents/${agent}/versions?order=desc&limit=1`);
  const newest = versions.data?.items[0];
  if (versions.loading || (newest && newest.version !== after.number)) return null; // of a graph there is none
  return html`<p class="note bad" role="alert"><strong>${agent} version ${after.number}: ${count(after.good)} of ${
    count(after.runs)} good, version ${before.number}: ${count(before.good)} of ${count(before.runs)}</strong>${newest
    && `; stored ${clock(newest.created_at)}`}. <${Link} path=${["health"]} query=${{ agent, span: "7d" }}>Both versions
    in figures<//>${newest && html` <${Link} path=${["agents", agent]} query=${{ tab: "versions" }}>What changed<//>`}
  </p>`;
}
