/** For who keeps it running: scheduler, providers, keys, audit, usage, schedules, webhooks. */
import { html } from "../html.js";
import { Audit } from "../operations/audit.js";
import { Keys, Secrets } from "../operations/keys.js";
import { Providers } from "../operations/providers.js";
import { Schedules } from "../operations/schedules.js";
import { Scheduler } from "../operations/scheduler.js";
import { Usage } from "../operations/usage.js";
import { Webhooks } from "../operations/webhooks.js";
import { Tabs } from "../parts/basics.js";
import { may } from "../person.js";
import { go } from "../router.js";

/** The tabs; the third value is a scope without which one is not shown. */
const VIEWS = { scheduler: [Scheduler, "Scheduler"], usage: [Usage, "Usage"], providers: [Providers, "Providers"], keys: [Keys, "Keys", "admin"], secrets: [Secrets, "Secrets"], schedules: [Schedules, "Schedules"], webhooks: [Webhooks, "Webhooks"], audit: [Audit, "Audit", "admin"] };

export function Operations({ id, query }) {
  const chosen = id in VIEWS ? id : "scheduler";
  const [view] = VIEWS[chosen];
  const tabs = Object.entries(VIEWS).filter(([, [, , needs]]) => !needs || may(needs)).map(([name, [, label]]) => [name, label]);
  return html`<div class="head"><h1>Operations</h1></div>
    <${Tabs} tabs=${tabs} chosen=${chosen} onChoose=${(name) => go(["operations", name])} label="Parts of operations" />
    <div role="tabpanel" aria-label=${VIEWS[chosen][1]} class="stacked"><${view} query=${query} /></div>`;
}
