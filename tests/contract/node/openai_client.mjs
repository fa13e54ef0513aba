// OpenAI's official client for JavaScript talks to the agent `clerk`: node openai_client.mjs URL KEY
// Prints what it got as one line of JSON.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = [{ role: "user", content: "Where is Ada?" }];
const locate = {
  type: "function",
  function: { name: "locate", parameters: { type: "object", properties: { user: { type: "string" } } } },
};
const got = {};

const made = await client.chat.completions.create({ model: "clerk", messages: asked });
got.whole = made.choices[0].message.content;

got.streamed = "";
const stream = await client.chat.completions.create({ model: "clerk", messages: asked, stream: true });
for await (const chunk of stream) got.streamed += chunk.choices[0]?.delta.content ?? "";

const runner = client.chat.completions.runTools({
  model: "clerk",
  messages: asked,
  tools: [{ ...locate, function: { ...locate.function, parse: JSON.parse, function: ({ user }) => `${user} is in Rome` } }],
});
got.tools = await runner.finalContent();

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: city } };
const parsed = await client.chat.completions.parse({ model: "clerk", messages: asked, response_format: format });
got.parsed = JSON.parse(parsed.choices[0].message.content);

const streamedJson = client.chat.completions.stream({ model: "clerk", messages: asked, response_format: format });
got.streamedJson = JSON.parse((await streamedJson.finalChatCompletion()).choices[0].message.content);
const textFormat = { format: { type: "json_schema", name: "place", strict: true, schema: city } };
const responseJson = client.responses.stream({ model: "clerk", input: "Where is Ada?", text: textFormat });
got.responseJson = JSON.parse((await responseJson.finalResponse()).output_text);

const first = await client.responses.create({ model: "clerk", input: "I am Ada." });
got.first = first.output_text;
const events = await client.responses.create({
  model: "clerk", input: "Who am I?", previous_response_id: first.id, stream: true,
});
got.events = [];
for await (const event of events) {
  got.events.push(event.type);
  if (event.type === "response.completed") got.second = event.response.output.at(-1).content[0].text;
}

got.errors = [];
for (const model of ["nobody", "clerk@9"]) {
  await client.chat.completions.create({ model, messages: asked }).catch((error) => {
    got.errors.push([error instanceof OpenAI.NotFoundError, error.code]);
  });
}
const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
await stranger.models.list().catch((error) => got.errors.push([error instanceof OpenAI.AuthenticationError, error.code]));
got.models = (await client.models.list()).data.map((each) => each.id);
console.log(JSON.stringify(got));
