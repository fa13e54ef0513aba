/** Messages of a prompt as lines of text, to compare two of them. Pure. */
import { plain } from "../format.js";

/** Arguments, a line for each: what differs between two calls is then one line. */
const argumentsOf = (given) => (given && typeof given === "object" && !Array.isArray(given)
  ? Object.entries(given).map(([name, value]) => `  ${name}: ${JSON.stringify(value)}`) : [`  ${plain(given)}`]);

const headOf = ({ role, origin, source, name }) => `[${[role === "tool" ? `result of ${name}` : role,
  origin === "context" || origin === "memory" ? `from ${source ?? origin}` : ""].filter(Boolean).join(", ")}]`;

/** `messages`: as of `GET /v1/runs/{id}/prompt`. */
export const linesOf = (messages) => messages.map((message) => [
  headOf(message),
  ...(plain(message.content) ? [plain(message.content)] : []),
  ...(message.tool_calls ?? []).flatMap((call) => [`calls ${call.name}`, ...argumentsOf(call.arguments)]),
].join("\n")).join("\n\n");
