/** The fields of an agent: their groups, and an agent as text. Pure. */

const GROUPS = {
  "What it does": ["description", "system_message", "model", "tools", "subagents"],
  "How it answers": ["params", "tool_choice_scope", "output_schema", "max_iterations", "on_length", "agent_comment",
    "tool_policy", "exit_on_success", "stateless"],
  "Memory, people and success": ["memory", "memory_scope", "facts", "recall", "approval", "success_check"],
};

/** Names of the fields in groups: `[[title, [name, …]], …]`. Fields without a group come last. */
export function groupsOf(schema) {
  const known = new Set(Object.values(GROUPS).flat());
  const others = Object.keys(schema.properties).filter((name) => !known.has(name));
  return Object.entries({ ...GROUPS, Other: others });
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

/** The fields of a stored agent that are sent to store it again. */
export function contentOf(agent, schema) {
  return Object.fromEntries(Object.entries(agent).filter(([name]) => name in schema.properties));
}

/** Place of the note on a version, in the agent's own metadata. */
const NOTE = "version_note";

export const noteOf = (agent) => agent.metadata?.[NOTE] ?? "";

/** The content with a note on the new version; "": without a note. */
export function withNote(content, note) {
  if (!note && !noteOf(content)) return content;
  const { [NOTE]: gone, ...rest } = content.metadata ?? {};
  return { ...content, metadata: note ? { ...rest, [NOTE]: note } : rest };
}

/** An agent that tries a tool with given arguments: it has only this tool, and instructions to call the tool. */
export function trialOf(tool, given) {
  const name = tool.type === "mcp" ? tool.tools?.[0] ?? tool.server : tool.name;
  return { model: "real", definition: { system_message: "Call the tool as you are told, then say what it answered.",
    tools: [tool] }, input: `Now call the tool '${name}' with these arguments: ${JSON.stringify(given)}.` };
}
