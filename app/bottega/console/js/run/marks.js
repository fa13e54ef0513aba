/** The events of a run that a reader looks for first. Pure. */
import { causeOf } from "./diagnosis.js";

/** Of each kind so many are offered. */
const MOST = 200;
/** @type {[string, RegExp, (event: any) => string][]} */
const KINDS = [
  ["Failures", /\.(failed|timeout)$/, ({ data }) => causeOf(data.error)],
  ["Decisions", /^interrupt\.(created|resolved)$/, ({ type, data }) => (type === "interrupt.created"
    ? `${data.tool} asks` : data.resolution?.decision ?? data.status)],
  ["Publications", /^memory\.published$/, ({ data }) => `version ${data.version}`],
];

/** Where a playback may jump: `[[kind, [{position, text}, …]], …]`, without empty kinds. */
export function marksOf(events) {
  const found = KINDS.map(([kind, types, say]) => [kind, events.flatMap((event, at) => (types.test(event.type)
    && event.data.error?.type !== "denied" // a decision, and no failure
    ? [{ position: at + 1, text: [event.data.node ?? event.agent, say(event)].filter(Boolean).join(": ") }] : []))
    .slice(0, MOST)]);
  return found.filter(([, marks]) => marks.length);
}
