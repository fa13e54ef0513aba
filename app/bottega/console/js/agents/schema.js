/** Fields of a form from the API's own description of an agent. Pure, but for reading it once. */
import { get } from "../api.js";

let read = null;

/** The schema of an agent's content, from `/openapi.json`; read once. */
export function agentSchema() {
  read ??= get("/openapi.json").then((document) => document.components.schemas.AgentContent, (error) => {
    read = null;
    throw error;
  });
  return read;
}

const GROUPS = {
  "What it does": ["description", "system_message", "model", "tools", "subagents"],
  "How it answers": ["params", "tool_choice_scope", "output_schema", "max_iterations", "on_length", "agent_comment",
    "tool_policy", "exit_on_success", "stateless"],
  "Memory, people and success": ["memory", "memory_scope", "recall", "approval", "success_check"],
};

/** The fields in groups; those that no group names come last: `[[title, [field, …]], …]`. */
export function fieldsOf(schema) {
  const known = new Set(Object.values(GROUPS).flat());
  const others = Object.keys(schema.properties).filter((name) => !known.has(name));
  return Object.entries({ ...GROUPS, Other: others })
    .map(([title, names]) => /** @type {[string, any[]]} */ ([title, names.filter((name) => name in schema.properties)
      .map((name) => field(name, schema))]));
}

/** `{name, label, help, kind, choices, least, most, isRequired, mayBeNull, usual}`. */
function field(name, schema) {
  const of = schema.properties[name];
  const choices = of.anyOf ?? [of];
  const plain = choices.filter((each) => each.type !== "null");
  const one = plain.length === 1 ? plain[0] : null;
  return {
    name, label: of.title ?? name, help: of.description ?? "", kind: kindOf(name, one), choices: one?.enum
      ?? one?.items?.enum ?? [],
    least: one?.minimum, most: one?.maximum ?? one?.maxLength, isRequired: schema.required?.includes(name) ?? false,
    mayBeNull: plain.length < choices.length, usual: of["x-default"],
  };
}

function kindOf(name, one) {
  if (name === "system_message") return "long";
  if (!one) return "json";
  if (one.enum) return "choice";
  if (one.type === "array" && one.items?.enum) return "several";
  if (one.type === "array" && one.items?.type === "string") return "lines";
  return { string: "text", boolean: "switch", integer: "number", number: "number" }[one.type] ?? "json";
}

/** An agent as lines of text, to compare two versions: long texts keep their lines. */
export function asText(agent) {
  const { name, version, created_at, effective_limits, ...content } = agent;
  return Object.keys(content).sort().map((key) => {
    const value = content[key];
    if (typeof value === "string" && value.includes("\n")) return `${key}:\n${value.replace(/^/gm, "  ")}`;
    return `${key}: ${JSON.stringify(value, null, 2)}`;
  }).join("\n");
}

/** What of an agent is sent to store it again. */
export function contentOf(agent, schema) {
  return Object.fromEntries(Object.entries(agent).filter(([name]) => name in schema.properties));
}
