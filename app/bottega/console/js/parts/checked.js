/** What is known of a call before a person decides: what was said, what tools found, what differs. */
import { get, url, withQuery } from "../api.js";
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { RunState } from "../run/state.js";
import { factsOf, saidByUser } from "./approval_facts.js";
import { Readable, ResultOf } from "./readable.js";

const LATEST = { order: "desc", limit: 200 };
const UNCHECKED = { name: null, text: "what was said could not be read, so nobody compared it", isGrave: true };

/** Read what was said before a call: `{said, text}`, the newest first; `text`: as `factsOf` takes it. */
async function readTalk({ run_id: run, session_id: session }) {
  const paths = [url`/v1/runs/${run}/messages`, session && url`/v1/sessions/${session}/messages`].filter(Boolean);
  const pages = await Promise.all(paths.map((path) => get(withQuery(path, LATEST))));
  const all = pages.flatMap(({ items }, at) => (at ? items.filter((each) => each.run_id !== run) : items));
  const said = all.filter(({ role, content, parts }) =>
    ["user", "assistant"].includes(role) && (content || parts?.length));
  return { said, text: pages.some((page) => page.next_cursor) ? null : saidByUser(all) };
}

/** Read the latest finished calls of tools of a run, whichever agent made them, the oldest first. */
async function readResults({ run_id: run }) {
  const types = "tool.started,tool.completed,tool.failed";
  const { items } = await get(withQuery(url`/v1/runs/${run}/events`, { types, ...LATEST }));
  const state = new RunState();
  for (const each of items.reverse()) state.apply(each);
  return [...state.tasks.values()].flatMap(({ tools }) => tools.filter(({ to }) => to)).sort((a, b) => a.to - b.to);
}

/** What was before a call: what was said, and what tools answered. */
export const readBefore = (asked) => Promise.all([readTalk(asked), readResults(asked)]);

/** Calls of the tenant, decided or not; null: not read yet. */
export function useOthers(everyMs) {
  const found = useData(withQuery("/v1/interrupts", LATEST), { everyMs });
  return found.data?.items ?? (found.error && !found.retries ? [] : null);
}

/** What is known of a call, among it `facts` and `asking` for `Decision`. `others`: of `useOthers`. */
export function useChecks(asked, others) {
  const talk = useData(url`what was before ${asked.id}`, { from: () => readBefore(asked) });
  const [{ said, text }, results] = talk.data ?? [{ said: [], text: null }, []];
  const isLost = talk.error && !talk.retries && !talk.data;
  const facts = others && (talk.data || isLost)
    ? factsOf(asked, text, others, results).concat(isLost ? UNCHECKED : []) : null;
  return { talk, said, text, results, facts,
    asking: plain(said.find(({ role, source }) => role === "user" && !source)?.content) };
}

/** Arguments in one line. */
export const worth = (given) => Object.values(given ?? {}).map(plain).join(" · ");

/** What tools answered before a call: the last five. */
export const Results = ({ of }) => of.length > 0 && html`<h3>What was looked up</h3>
  ${of.slice(-5).map(({ name, arguments: given, status, result, error, seq }) => html`<div key=${seq}
    class="said tool-said looked-up" tabindex="0" role="group" aria-label=${`Result of ${name}`}>
    <${ResultOf} message=${{ name, status: status === "completed" ? "success" : "error" }} />
    <p class="small soft">${excerpt(worth(given), 100)}</p><${Readable} value=${error?.message ?? result} /></div>`)}`;
