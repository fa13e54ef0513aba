/** English texts of the console, by key, such as the code of an error. */

/** Reasons why a run waits. */
export const WAITS_FOR = { person: "a person", client: "the client", children: "child runs", model: "a model",
  time: "its next try" };

/** Titles of errors by their status. */
export const ERROR_TITLES = { 0: "No connection", 403: "This key may not do this" };

/** Descriptions of form fields whose description in the API speaks of JSON. */
export const FIELD_HELP = {
  model: "A model of one of your servers, as SERVER/MODEL. Left empty: the default model.",
  approval: "Whether a person must agree before a call. Usual: as the agent says; and an agent asks nobody.",
  headers: "What each request sends: texts, or secrets by their names.",
  parameters: "What the model fills in for a call, such as the placeholders of the URL.",
  agent: "Name of the agent that the node asks.",
  router: "The agent chooses which of the next nodes go on, in place of conditions on edges.",
};

/** Kinds of questions to people. */
export const ASKED = {
  approval: "Approve this call?", question: "A question for you", client_tool: "A call for your program",
};

/** States of conversations. */
export const CONVERSATION_STATES = { answering: "answers", waiting: "waits for you", failed: "failed", idle: "idle" };

/** Outcomes of runs. */
export const OUTCOME_WORDS = { SUCCESS: "good", PARTIAL: "partly", FAILURE: "bad", CANCELLED: "cancelled",
  UNKNOWN: "not judged" };

/** Outcomes that are not good, as an address lists these: in the order of the words. */
export const NOT_GOOD = "PARTIAL,FAILURE";

/** Sources of outcomes, in the words of all pages and files. */
export const JUDGES = { feedback: "people", judge: "judges", check: "checks", status: "status" };
export const JUDGES_MEAN = "People rate answers; judges are models; checks compare texts or schemas; by its status a "
  + "run is bad that failed or ran out of time, and that nobody else judged.";

/** Groups to which the experiment about memory assigns runs at random. */
export const MEMORY_DRAWS = { with: "with", without: "without, by lot" };

/** Precision of times that are counted in classes. */
export const ABOUT = "Times with ≈ are within 10 %.";

/** The runs that figures count, the same on all pages; each page says whether batches count. */
export const COUNTED = "Counted are all runs that are over: completed, failed, out of time or cancelled; no drafts.";

/** The pages that show more about the cause of a failure. */
export const DIAGNOSIS_PLACES = { providers: "Health of the model's server", scheduler: "Workers and queue" };

/** Names of the parts of a task's time. */
export const SPAN_KINDS = { queue: "waiting in the queue", model: "model", failed: "failed try",
  retry: "pause before a retry", held: "held back before the model", tool: "tool",
  broken: "failed call of a tool", person: "waiting for a person", wait: "waiting for something else" };

/** Failures of a model's server, by the code of the error. */
export const MODEL_ERRORS = {
  model_timeout: "took too long to answer",
  model_rate_limited: "refused calls above its rate",
  model_unauthorized: "refused its key",
  model_forbidden: "refused its key",
  model_not_found: "does not know the model",
  model_quota_exhausted: "has no quota left",
  model_context_too_long: "got more text than it can read",
  model_filtered: "blocked the answer",
  model_stream_broken: "broke off its answer",
  model_bad_response: "sent what is no model's answer",
  model_bad_request: "rejected the request",
  model_unavailable: "could not be reached",
};

/** Reasons why a run failed, by the code of the error. */
export const RUN_ERRORS = {
  queue_timeout: "waited too long in the queue",
  max_iterations: "its agent used all the model calls that it may make",
};

/** Reasons why a model call was not sent, by the code of the error. The model's name comes before the text. */
export const HELD_BACK = { model_circuit_open: "kept failing", model_limited: "was at the limits of its server" };

/** Parts of a run that may take most of the run's time. */
export const LONG_WORK = { model: ["a call of", "calls of"], tool: ["a call of the tool", "calls of the tool"],
  person: ["for a person to decide about", "for people to decide about"] };

/** Sentences about what a run waits for, by the reason of the wait. */
export const WAITED_FOR = { person: "a person", client: "your program", children: "its child runs",
  model: "the model's server", time: "its next try" };

/** When each way to run again helps. */
export const RETRY_HELP = {
  last_step: "Helps when the cause is over, such as a model that failed: keeps all work before the failure, "
    + "with the same versions.",
  start: "Does all work again, with the same versions: helps when the answer was bad by chance.",
  change: "A new run with the agent's present version: helps after the agent was corrected.",
};

const WHEN_OVER = "When the cause is over, Retry from the last step goes on without doing the earlier work again.";
const AFTER_A_CHANGE = "A retry asks the same with the same versions: correct the cause, then use Change and run.";

/** The way to run again that certainly helps after a failure, by the code of the failure. */
export const RETRY_HINTS = { model_unavailable: WHEN_OVER, model_timeout: WHEN_OVER, model_rate_limited: WHEN_OVER,
  model_quota_exhausted: WHEN_OVER, model_bad_request: AFTER_A_CHANGE, model_not_found: AFTER_A_CHANGE,
  model_context_too_long: AFTER_A_CHANGE, max_iterations: AFTER_A_CHANGE };

/** States of a page's connection to the events of a run. */
export const LINK_STATES = { connecting: "Connecting…", live: "Live", ended: "Ended", gone: "Deleted" };
