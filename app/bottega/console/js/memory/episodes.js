/** Episodes: the memory of runs. A search with explained scores, and the page of an episode. */
import { useRef, useState } from "preact/hooks";

import { post, url, withQuery } from "../api.js";
import { JUDGES, OUTCOME_WORDS } from "../en.js";
import { count, duration, excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { Empty, Failure, Figure, Figures, Link, Panel, Read, Select, Time, Value } from "../parts/basics.js";
import { Filter, filtersOf, Pages, Rows } from "../parts/lists.js";
import { may } from "../person.js";
import { go } from "../router.js";
import { Learnt } from "./given.js";

const OUTCOMES = Object.entries(OUTCOME_WORDS);
const TERMS = ["similarity", "recency", "success", "accesses", "domain"];
const TONES = { SUCCESS: "ok", PARTIAL: "wait", FAILURE: "bad" };
export const Outcome = ({ value }) => html`<span class="status ${TONES[value] ?? "quiet"}">
  ${OUTCOME_WORDS[value ?? "UNKNOWN"]}</span>`;

/**
 * The texts of a form's fields by their names.
 *
 * @param {HTMLFormElement} form
 * @returns {Record<string, string>}
 */
const fieldsOf = (form) => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)]));

/** Which episodes are shown: of a user, a session, or all; without the scope `admin`: without user and session. */
function whoseOf({ user, session_id }) {
  if (user || session_id) return { user, session_id };
  return may("admin") ? { scope: "tenant" } : {};
}

export function Episodes({ query }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const asked = useRef(0); // how often; only the answer to the last question is shown
  const whose = whoseOf(query);
  const search = async (event) => {
    event.preventDefault();
    const { text, by, outcome } = fieldsOf(event.currentTarget);
    const turn = ++asked.current;
    setError(null);
    if (!text.trim()) return setFound(null);
    const filters = outcome ? { outcomes: [outcome] } : {};
    try {
      const answer = await post("/v1/episodes/search", { query: text.trim(), by, k: 20, explain: true, filters,
        ...whose });
      if (turn === asked.current) setFound(answer);
    } catch (problem) {
      if (turn === asked.current) setError(problem);
    }
  };
  const set = (change) => (asked.current++, setFound(null), go(["memory"], { ...query, ...change }, { replace: true }));
  const field = (name, label) => html`<${Filter} label=${label} value=${query[name] ?? ""}
    onChange=${(value) => set({ [name]: value || undefined })} />`;
  return html`
    <form class="filters" onSubmit=${search}>
      <label class="grow">Search for episodes like this <input name="text" type="search"
        placeholder="What is the task about?" /></label>
      <${Select} name="by" label="Compare with their" options=${["task", "result", "whole"]} />
      <${Select} name="outcome" label="That ended in" any="anything" options=${OUTCOMES} />
      ${field("user", "User")} ${field("session_id", "Session")}
      <button class="button primary">Search</button>
    </form>
    ${!Object.keys(whose).length && html`<p
      class="note">Only episodes without a user and a session are shown.
      To see all, use a key with the scope <code>admin</code>; or name a user or a session.</p>`}
    ${error && html`<${Failure} error=${error} />`}
    ${found ? html`<${Hits} found=${found} />` : html`<${Latest} query=${query} whose=${whose} />`}`;
}

function Hits({ found }) {
  if (!found.items.length) return html`<${Panel}><${Empty} title="No episode is like that." /><//>`;
  return html`<${Panel} title=${`${count(found.items.length)} episodes${found.by_meaning === false
    ? ", by words and spelling, not by meaning" : ""}`}>
    <ol class="rows">${found.items.map(({ episode, score, parts }) => html`<li key=${episode.id}>
      <p><${Link} path=${["memory", "episodes", episode.id]}>${excerpt(episode.summary.task, 120)}<//> <${Outcome}
        value=${episode.outcome} /></p>
      <p class="small soft">${episode.agent ?? "–"} · <${Time} at=${episode.at}
        /> · ${excerpt(episode.summary.result, 120)}</p>
      ${score != null && html`<${Score} score=${score} parts=${parts} />`}</li>`)}</ol><//>`;
}

/** A score, the terms of its sum, and the measured values of the terms. */
function Score({ score, parts }) {
  const measured = Object.keys(parts).filter((name) => !TERMS.includes(name) && parts[name] !== null);
  return html`<details class="tool"><summary class="small">Score ${score.toFixed(3)}</summary>
    <dl class="terms">${TERMS.map((name) => html`<div><dt>${name}</dt>
      <dd><span class="stack" aria-hidden="true"><i class="bar model"
        style=${{ width: `${Math.min(100, 100 * parts[name])}%` }}></i></span> ${parts[name].toFixed(3)}</dd></div>`)}
          </dl>
    <p class="small soft">Measured: ${measured.map((name) => `${name.replaceAll("_",
      " ")} ${shown(parts[name])}`).join(", ")}.</p></details>`;
}

const shown = (value) => (typeof value === "number" ? value.toFixed(3) : value ? "yes" : "no");

function Latest({ query, whose }) {
  const path = withQuery("/v1/episodes", { order: "desc", outcome: query.outcome, ...whose });
  const { choice } = filtersOf(["memory"], query);
  return html`<${Panel} title="Latest episodes" actions=${choice("outcome", "Outcome", OUTCOMES, { kind: "inline" })}>
    <${Pages} key=${path} path=${path} what="episodes" isSaved everyMs=${10_000}>${(items) => html`<${Rows}
      label="Episodes" items=${items} head=${["Task", "Agent", "Outcome", "Result", "When"]}
      empty="No episode is like that." hint=${html`<p>A run with memory <code>full</code> leaves one at its end.</p>`}
      cells=${(each) => [html`<${Link} path=${["memory", "episodes", each.id]}>${excerpt(each.summary.task, 90)}<//>`,
        each.agent ?? "–", html`<${Outcome} value=${each.outcome} />`, excerpt(each.summary.result, 80),
        html`<${Time} at=${each.at} />`]} />`}<//><//>`;
}

export const Episode = ({ id }) => html`<${Read} path=${url`/v1/episodes/${id}`} what="the episode">
  ${(episode) => html`
    <div class="head"><div><h2>${excerpt(episode.summary.task, 160)}</h2><p class="small soft"><${Outcome}
      value=${episode.outcome} /> <${Time} at=${episode.at} />${episode.agent && html` · agent <${Link}
        path=${["agents", episode.agent]}>${episode.agent}<//>`}${episode.run_id && html` · <${Link}
          path=${["runs", episode.run_id]}>its run<//> · <${Link}
            path=${["memory", "runs", episode.run_id]}>what it was given and learnt<//>`}${episode.user
              && ` · user ${episode.user}`}</p></div></div>
    <${Figures}>
      <${Figure} name="Judged by" value=${JUDGES[episode.verdict?.by ?? "status"] ?? episode.verdict.by}
        note=${episode.feedback && `${episode.feedback.by}${episode.feedback.comment ? `: ${episode.feedback.comment}`
          : ""}`} />
      <${Figure} name="Lasted" value=${duration(episode.execution.duration_s != null
        ? episode.execution.duration_s * 1000 : null)} />
      <${Figure} name="Times given" value=${count(episode.state.access_count)}
        note=${episode.state.last_access && html`last <${Time} at=${episode.state.last_access} />`} />
      <${Figure} name="Trust" value=${count(episode.trust)} note="of 3" />
      <${Figure} name="State" value=${episode.state.state.toLowerCase()} />
    <//>
    <div class="columns">
      <${Panel} title="Asked"><div class="body"><${Value} value=${plain(episode.task.original_input)} />
        ${episode.task.goals?.length > 0 && html`<p class="small">Goals: ${episode.task.goals.map(plain).join("; ")}
          </p>`}</div><//>
      <${Panel} title="Result"><div class="body">${episode.result.error && html`<${Wrong} error=${episode.result.error}
        />`}<${Value} value=${plain(episode.result.output) || "–"} /></div><//>
    </div>
    <${Panel} title="Steps"><${Steps} trace=${episode.execution.trace ?? []} text=${episode.summary.steps} /><//>
    ${episode.reflection && html`<${Panel} title="What was learnt"><${Learnt} of=${episode.reflection} /><//>`}`}<//>`;

/** An error: `code` of a run's error, `type` of an imported episode's error. */
const Wrong = ({ error }) => html`<p class="note bad"><strong>${error.code ?? error.type}</strong> ${error.message}
  </p>`;

/** Steps of Bottega's runs are calls and answers; steps of other systems are shown as JSON. */
function Steps({ trace, text }) {
  if (!trace.length) return html`<div class="body"><pre class="text">${text || "No step is recorded."}</pre></div>`;
  return html`<ol class="rows steps">${trace.map((step, i) => html`<li key=${i}
    class=${step.error || step.status === "failed" ? "failed" : ""}>
    ${step.agent && html`<span class="small soft">${step.agent}</span> `}<code>
      ${step.tool ?? (step.step == null ? "step" : `step ${step.step}`)}</code> ${step.arguments && html`<span
        class="mono small">${excerpt(plain(step.arguments), 160)}</span>`}
    <p class="small">${step.error ? html`<span class="bad-text">${excerpt(step.error.message ?? plain(step.error), 240)}
      </span>` : excerpt(plain(step.result ?? step.answer ?? (step.step ? step.status : step) ?? ""), 240)}</p></li>`)}
        </ol>`;
}
