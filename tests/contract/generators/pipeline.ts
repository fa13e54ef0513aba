// Runs a pipeline with the client that @hey-api/openapi-ts made: node pipeline.js URL KEY
import { createAgent, createGraph, createRun, getRun, listRunEvents } from "./made";
import { client } from "./made/client.gen";

declare const process: { argv: string[] };

async function main(): Promise<void> {
  const [url, key] = process.argv.slice(2);
  client.setConfig({ baseUrl: url, auth: key, throwOnError: true });
  for (const name of ["first", "second"]) {
    await createAgent({ body: { name, description: `The ${name}.`, system_message: "You help." } });
  }
  const graph = await createGraph({ body: { name: "line", edges: [{ source: "first", target: "second" }] } });
  const body = { mode: "dag" as const, graph: "line", input: "Build a todo app." };
  const started = await createRun({ body, query: { wait: 30 } });
  const id: string = started.data!.id;
  const run = await getRun({ path: { run_id: id } });
  const events = await listRunEvents({ path: { run_id: id }, query: { limit: 3 } });
  const missing = await getRun({ path: { run_id: "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11" }, throwOnError: false });
  console.log(JSON.stringify({
    edges: graph.data!.edges.length, status: run.data!.status, output: run.data!.output,
    seqs: events.data!.items.map((each) => each.seq), missing: (missing.error as { code: string }).code,
  }));
}

void main();
