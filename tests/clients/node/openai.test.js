// OpenAI's SDK for Node, as its users write it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { serve } from "./server.js";

let server, client, model;
const messages = [{ role: "user", content: "Tell me a story about a fox." }];

before(async () => {
  server = await serve();
  client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: "none", maxRetries: 0 });
  model = (await client.models.list()).data[0].id;
});

after(async () => assert.equal(await server.stop(), 0));

test("a chat, whole and streamed, says the same", async () => {
  const ask = { model, messages, max_tokens: 24, seed: 3, temperature: 1 };
  const whole = await client.chat.completions.create(ask);
  assert.ok(whole.choices[0].message.content.length > 0);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  let text = "", usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream helper puts the answer together", async () => {
  const stream = client.chat.completions.stream({ model, messages, max_tokens: 12 });
  let deltas = "";
  stream.on("content", (delta) => (deltas += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, deltas);
});

test("a completion with log probabilities", async () => {
  const made = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 4, logprobs: 2, n: 2 });
  assert.equal(made.choices.length, 2);
  assert.equal(made.choices[1].logprobs.tokens.length, made.choices[1].logprobs.token_logprobs.length);
});

test("structured output by zod, parsed", async () => {
  const Person = z.object({ name: z.string().max(20), age: z.number().int(), tags: z.array(z.enum(["a", "b"])).max(3) });
  const made = await client.chat.completions.parse({
    model, messages, max_tokens: 400, seed: 1, temperature: 0.5, response_format: zodResponseFormat(Person, "person"),
  });
  const person = made.choices[0].message.parsed;
  assert.ok(Number.isInteger(person.age) && person.tags.every((tag) => ["a", "b"].includes(tag)));
});

test("a function that must be called is, with arguments of its schema", async () => {
  const parameters = { type: "object", properties: { city: { type: "string", maxLength: 12 }, days: { type: "integer" } }, required: ["city", "days"], additionalProperties: false };
  const ask = {
    model, messages, max_tokens: 300, temperature: 0.5, seed: 5,
    tools: [{ type: "function", function: { name: "weather", strict: true, parameters } }],
    tool_choice: { type: "function", function: { name: "weather" } },
  };
  const made = await client.chat.completions.create(ask);
  const call = made.choices[0].message.tool_calls[0];
  assert.equal(call.function.name, "weather");
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["city", "days"]);
  const final = await client.chat.completions.stream(ask).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
});

test("responses: whole, streamed by events, gone on from, parsed", async () => {
  const first = await client.responses.create({ model, input: "Once upon a time", max_output_tokens: 16 });
  assert.ok(first.output_text.length > 0);
  const stream = client.responses.stream({ model, input: "And then?", previous_response_id: first.id, max_output_tokens: 16 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  const final = await stream.finalResponse();
  assert.equal(final.output_text, text);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  const Answer = z.object({ ok: z.boolean() });
  const parsed = await client.responses.parse({ model, input: "?", max_output_tokens: 100, text: { format: zodTextFormat(Answer, "answer") } });
  assert.equal(typeof parsed.output_parsed.ok, "boolean");
});

test("embeddings, which this SDK asks for in base64", async () => {
  const made = await client.embeddings.create({ model, input: ["a fox", "a hen"] });
  const [a, b] = made.data.map((one) => one.embedding);
  assert.equal(a.length, b.length);
  const norm = Math.hypot(...a);
  assert.ok(Math.abs(norm - 1) < 1e-3, `${norm}`);
  const floats = await client.embeddings.create({ model, input: "a fox", encoding_format: "float" });
  assert.deepEqual(floats.data[0].embedding.map(Math.fround), a.map(Math.fround));
});

test("errors are the SDK's classes and name the parameter", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
  const strict = await serve("--api-key", "right");
  try {
    const wrong = new OpenAI({ baseURL: `${strict.url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
  } finally {
    assert.equal(await strict.stop(), 0);
  }
});

test("an aborted stream ends the request", async () => {
  const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 400 });
  for await (const _ of stream) break;
  const deadline = Date.now() + 20_000;
  for (;;) {
    const page = await (await fetch(`${server.url}/metrics`)).text();
    if (/vllm:num_requests_running\{[^}]*\} 0/.test(page)) break;
    assert.ok(Date.now() < deadline, "it still runs");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
});
