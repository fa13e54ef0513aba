// The AI SDK talks to the agent `clerk` in both forms of OpenAI's API: node ai_sdk.mjs URL KEY
// Prints what it got in each form as one line of JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [baseURL, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey });
const locate = tool({
  description: "Says where a user is.",
  inputSchema: jsonSchema({ type: "object", properties: { user: { type: "string" } }, additionalProperties: false }),
  execute: async ({ user }) => `${user} is in Rome`,
});
const place = jsonSchema({
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
});

async function talk(model) {
  const got = {};
  const more = { model, maxRetries: 0 };
  const messages = [{ role: "user", content: "I am Ada." }];
  const first = await generateText({ ...more, messages });
  got.first = first.text;
  messages.push(...first.response.messages, { role: "user", content: "Who am I?" });
  const second = streamText({ ...more, messages });
  got.second = "";
  for await (const piece of second.textStream) got.second += piece;
  messages.push(...(await second.response).messages, { role: "user", content: "Where am I?" });
  const third = await generateText({ ...more, messages, tools: { locate }, stopWhen: stepCountIs(5) });
  got.tools = [third.steps.length, third.steps[0].text, third.text];
  messages.push(...third.response.messages, { role: "user", content: "Sure?" });
  const fourth = streamText({ ...more, messages, tools: { locate }, stopWhen: stepCountIs(5) });
  got.streamedTools = "";
  for await (const piece of fourth.textStream) got.streamedTools += piece;
  got.usage = (await fourth.totalUsage).totalTokens > 0;
  got.object = (await generateObject({ ...more, schema: place, prompt: "Where?" })).object;
  return got;
}

console.log(JSON.stringify({ chat: await talk(openai.chat("clerk")), responses: await talk(openai.responses("clerk")) }));
