/** Runs that wait for a model, with the cause, wherever an operator looks. */
import { html } from "../html.js";
import { modelWaits } from "../health/queue.js";
import { Link, Time } from "./basics.js";

/** The address of the list of these runs. */
export const waitingForModel = (agent) => ({ waiting_for: "model", agent });

/** `scheduler`: of `useData`; `agent`: only its runs. Nothing, while no run waits for a model. */
export function ModelWaits({ scheduler, agent }) {
  const waits = modelWaits(scheduler.data?.waiting ?? [], agent);
  return waits && html`<p class="note bad" role="alert">${waits.text} Of these runs the first waits since <${Time}
    at=${waits.since} />. <${Link} path=${["runs"]} query=${waitingForModel(agent)}>Runs that wait for a model<//>
    ${" "}<${Link} path=${["operations", "providers"]}>Model servers<//></p>`;
}
