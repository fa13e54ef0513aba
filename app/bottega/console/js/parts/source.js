/** Where a text in a prompt comes from: another agent, or memory of earlier runs. */
import { shortId } from "../format.js";
import { html } from "../html.js";
import { Link } from "./basics.js";

const WORDS = { episode: "episode", pattern: "pattern", insight: "lesson" };
const PLACES = { episode: "episodes", pattern: "patterns" };

/** `of`: a source as events name it, such as `episode:ID`; an agent's name stays as it is. */
export function Source({ of }) {
  const [kind, id] = of.split(":");
  if (!id || !WORDS[kind]) return of;
  const words = `${WORDS[kind]} ${shortId(id)}`;
  return PLACES[kind] ? html`<${Link} path=${["memory", PLACES[kind], id]}>${words}<//>` : words;
}
