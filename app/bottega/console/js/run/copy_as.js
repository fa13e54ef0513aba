/** A run as a program that starts one like it. Pure. */

/** What a new run takes over from another one. */
export const TAKEN = ["agent", "graph", "mode", "user", "memory", "token_budget", "cost_budget", "timeout_s",
  "output_schema", "goals", "constraints", "success_criteria"];

/** The body of a `POST /v1/runs` that asks the same. */
export const requestOf = (run) => Object.fromEntries(
  [...TAKEN, "input"].filter((name) => run[name] != null).map((name) => [name, run[name]]));

/** A text in single quotes of a shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const WORDS = { true: "True", false: "False", null: "None" };

/** A value of JSON as one of Python; texts are written alike in both. */
function pythonOf(value, indent = "") {
  const inner = `${indent}    `;
  const lines = (open, items, close) => (items.length
    ? `${open}\n${items.map((each) => `${inner}${each},\n`).join("")}${indent}${close}` : open + close);
  if (Array.isArray(value)) return lines("[", value.map((each) => pythonOf(each, inner)), "]");
  if (value === null || typeof value !== "object") return WORDS[String(value)] && typeof value !== "string"
    ? WORDS[String(value)] : JSON.stringify(value);
  return lines("{", Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonOf(each, inner)}`),
    "}");
}

const START = "/v1/runs?wait=60";

const curl = (address, body) => `curl -sf ${quoted(address)} -H 'content-type: application/json' \\
  -H "authorization: Bearer $BOTTEGA_KEY" -d ${quoted(JSON.stringify(body, null, 2))}
`;

const python = (address, body) => `import os

import httpx2

headers = {"authorization": f"Bearer {os.environ.get('BOTTEGA_KEY', '')}"}
body = ${pythonOf(body)}
answer = httpx2.post(${JSON.stringify(address)}, json=body, headers=headers, timeout=90)
answer.raise_for_status()
print(answer.json()["output"])
`;

const typescript = (address, body) => `const answer = await fetch(${JSON.stringify(address)}, {
  method: "POST",
  headers: {
    "content-type": "application/json",
    authorization: \`Bearer \${process.env.BOTTEGA_KEY ?? ""}\`,
  },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
if (!answer.ok) throw new Error(await answer.text());
console.log((await answer.json()).output);
`;

/** A file for `bottega apply`, which starts it every morning; JSON is YAML, too. */
const applied = (body) => `${JSON.stringify({
  schedules: [{ name: body.agent ?? body.graph, cron: "0 8 * * *", timezone: "UTC", run: body }],
}, null, 2)}
`;

/** `{curl, Python, TypeScript, apply}`: texts by their names. `base`: the server's address. */
export function programsOf(run, base) {
  const body = requestOf(run);
  const address = base + START;
  return { curl: curl(address, body), Python: python(address, body), TypeScript: typescript(address, body),
    apply: applied(body) };
}
