/** For who keeps it running: scheduler, providers, keys, audit, schedules, webhooks. */
import { html } from "../html.js";
import { Audit } from "../operations/audit.js";
import { Keys, Secrets } from "../operations/keys.js";
import { Providers } from "../operations/providers.js";
import { Schedules } from "../operations/schedules.js";
import { Scheduler } from "../operations/scheduler.js";
import { Webhooks } from "../operations/webhooks.js";
import { Tabs, chosenOf, permitted } from "../parts/basics.js";
import { go } from "../router.js";

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
