/** What runs remember and learn: episodes, lessons, patterns with their evidence, whether it helped, reports. */
import { MemoryFigures } from "../figures/outcomes.js";
import { html } from "../html.js";
import { Episode, Episodes } from "../memory/episodes.js";
import { Given } from "../memory/given.js";
import { Lessons } from "../memory/lessons.js";
import { Pattern, Patterns } from "../memory/patterns.js";
import { Report, Reports } from "../memory/reports.js";
import { Tabs } from "../parts/basics.js";
import { go } from "../router.js";

const VIEWS = { episodes: [Episodes, Episode], lessons: [Lessons, Lessons], patterns: [Patterns, Pattern],
  runs: [Episodes, Given],
  figures: [MemoryFigures, MemoryFigures], reports: [Reports, Report] };
const TABS = [["episodes", "Episodes"], ["lessons", "Lessons"], ["patterns", "Patterns"], ["figures", "Did it help?"],
  ["reports", "Reports"]];

export function Memory({ rest: [part = "episodes", id], query }) {
  const [all, one] = VIEWS[part] ?? VIEWS.episodes;
  const chosen = part === "runs" || !(part in VIEWS) ? "episodes" : part;
  return html`<div class="head"><h1>Memory</h1></div>
    <${Tabs} tabs=${TABS} chosen=${chosen} onChoose=${(name) => go(["memory", name])} label="Parts of memory" />
    <div role="tabpanel" aria-label=${chosen} class="stacked"><${id ? one : all} key=${id} id=${id} query=${query} />
      </div>`;
}
