// OpenAI's JavaScript SDK against millrace-agent: chats and responses, whole, streamed, parsed, with tools, stored, in the background.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const installed = createRequire(pathToFileURL(`${process.env.MILLRACE_NPM}/`));
const OpenAI = installed("openai");
const client = new OpenAI({ maxRetries: 0 });
const model = process.env.MILLRACE_MODEL;
const [prompt, answer] = ["Please reverse: jyaiptx", "xtpiayj"];
const messages = [{ role: "user", content: prompt }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "get_weather", description: "Get the weather of a city.", parameters };
const asked = "What is the weather in Oslo?";

const whole = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 60 });
assert.equal(whole.choices[0].message.content, answer);
const chunks = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 60 });
assert.equal(await chunks.finalContent(), answer);

const tools = [{ type: "function", function: { ...described, parse: JSON.parse, function: () => "18 degrees" } }];
const turn = { model, temperature: 0, max_tokens: 200, messages: [{ role: "user", content: asked }], tools };
assert.equal(await client.chat.completions.runTools({ ...turn, stream: true }).finalContent(), "18 degrees");

const response = { model, temperature: 0, max_output_tokens: 200 };
assert.equal((await client.responses.create({ ...response, input: prompt })).output_text, answer);
const stream = client.responses.stream({ ...response, input: prompt });
assert.equal((await stream.finalResponse()).output_text, answer);

const called = { ...response, tools: [{ type: "function", strict: false, ...described }] };
const first = await client.responses.create({ ...called, input: asked });
assert.deepEqual(JSON.parse(first.output[0].arguments), { city: "Oslo" });
const result = { type: "function_call_output", call_id: first.output[0].call_id, output: "18 degrees" };
const second = await client.responses.create({ ...called, input: [result], previous_response_id: first.id });
assert.equal(second.output_text, "18 degrees");

const events = [];
for await (const event of await client.responses.create({ ...response, input: prompt, background: true, stream: true }))
  events.push(event);
const last = events.at(-1);
assert.equal(last.type, "response.completed");
const again = [];
for await (const event of await client.responses.retrieve(last.response.id, { stream: true, starting_after: 3 }))
  again.push(event);
assert.deepEqual(again, events.slice(4));
await client.responses.delete(last.response.id);
