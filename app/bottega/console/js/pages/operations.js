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
import { go } from "../router.js";

const VIEWS = { scheduler: [Scheduler, "Scheduler"], usage: [Usage, "Usage"], providers: [Providers, "Providers"], keys: [Keys, "Keys"], secrets: [Secrets, "Secrets"], schedules: [Schedules, "Schedules"], webhooks: [Webhooks, "Webhooks"], audit: [Audit, "Audit"] };

export function Operations({ id, query }) {
  const chosen = id in VIEWS ? id : "scheduler";
  const [view] = VIEWS[chosen];
  return html`<div class="head"><h1>Operations</h1></div>
    <${Tabs} tabs=${Object.entries(VIEWS).map(([name, [, label]]) => [name, label])} chosen=${chosen} onChoose=${(name) => go(["operations", name])} label="Parts of operations" />
    <div role="tabpanel" aria-label=${VIEWS[chosen][1]} class="stacked"><${view} query=${query} /></div>`;
}
