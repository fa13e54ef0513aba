/** Answers that nobody has rated, one after the other: g and b rate, c comments, j and k go on. */
import { useState } from "preact/hooks";

import { withQuery } from "../api.js";
import { count, plain } from "../format.js";
import { html } from "../html.js";
import { Button, Empty, Link, Panel, Read, Time, useHeading } from "../parts/basics.js";
import { useKeys } from "../parts/keys.js";
import { Filter } from "../parts/lists.js";
import { Markdown } from "../parts/markdown.js";
import { go, route } from "../router.js";
import { Rating, textOf } from "../run/story.js";

const AT_ONCE = 20;

/** The beginning of a day such as "2026-11-28" where the reader is. */
const startOf = (day) => new Date(`${day}T00:00`).toISOString();

export function Ratings({ query }) {
  const { agent, user, q, since } = query;
  const path = withQuery("/v1/runs", {
    status: "completed", rated: "false", agent, user, q, created_after: since && startOf(since),
    view: "full", limit: AT_ONCE, order: "desc",
  });
  const field = (name, label, rest = {}) => html`<${Filter} label=${label} value=${query[name] ?? ""} leaves ...${rest}
    onChange=${(text) => go(["ratings"], { ...route.value.query, [name]: text }, { replace: true })} />`;
  // Read once: what is rated stays in its place.
  return html`
    <div class="head"><h1>Ratings</h1><p class="small soft">Keys: <kbd>g</kbd> good, <kbd>b</kbd> bad,${" "}
      <kbd>c</kbd> comment, <kbd>j</kbd> next, <kbd>k</kbd> before</p></div>
    <form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${field("q", "Question contains", { kind: "grow", type: "search", maxlength: 500 })} ${field("agent", "Agent")}
      ${field("user", "User")} ${field("since", "Since", { type: "date" })}</form>
    <${Read} path=${path} what="answers" ended=${() => true}>${({ items, next_cursor }, reload) => items.length
      ? html`<${Queue} key=${items.map(({ id }) => id).join()} runs=${items} hasMore=${next_cursor !== null}
        more=${reload} />`
      : html`<${Panel}><${Empty} title=${agent || user || q || since
        ? "No answer like that waits for a rating." : "Every answer is rated."} /><//>`}<//>`;
}

/** `more` reads the next answers. */
function Queue({ runs, hasMore, more }) {
  const [at, setAt] = useState(0);
  const [rated, setRated] = useState({});
  const show = (number) => runs[number] && setAt(number);
  const run = { ...runs[at], outcome: rated[runs[at].id] ?? runs[at].outcome };
  const onRated = (value) => {
    setRated((old) => ({ ...old, [run.id]: { value, source: "feedback" } }));
    setAt((now) => (now === at && runs[at + 1] ? at + 1 : now)); // another one may be shown by now
  };
  const whole = useHeading(run.id);
  useKeys({ j: () => show(at + 1), k: () => show(at - 1) });
  const done = Object.keys(rated).length;
  return html`
    <p role="status">${count(at + 1)} of ${hasMore ? "the next " : ""}${count(runs.length)}, ${count(done)} rated
      ${done === runs.length && html` <${Button} kind="small" onClick=${more}>Show the next ones<//>`}</p>
    <div class="stacked" ref=${whole}>
    <${Panel} title="Question" actions=${html`<${Link} path=${["runs", run.id]}>The run<//>`}>
      <div class="body"><pre class="text story">${plain(run.input)}</pre>
        <p class="small soft">${run.agent ?? run.graph}${run.user && ` · user ${run.user}`} ·${" "}
          <${Time} at=${run.created_at} /></p></div><//>
    <${Panel} title="Answer">
      <div class="body"><${Markdown} key=${run.id} text=${textOf(run.output)} kind="story" /></div>
      <div class="body"><${Rating} key=${run.id} run=${run} onRated=${onRated} byKey /></div><//>
    </div>`;
}
