// Ollama's SDK for Node, as its users write it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Ollama } from "ollama";

import { serve } from "./server.js";

let server, client, model;
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const greedy = { temperature: 0, num_predict: 16 };

before(async () => {
  server = await serve();
  client = new Ollama({ host: server.url });
  model = (await client.list()).models[0].name;
});

after(async () => assert.equal(await server.stop(), 0));

test("a chat, whole and streamed, says the same", async () => {
  const whole = await client.chat({ model, messages, options: greedy });
  assert.ok(whole.done && whole.message.content.length > 0);
  let text = "", last;
  for await (const part of await client.chat({ model, messages, options: greedy, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, whole.message.content);
  assert.equal(last.eval_count, whole.eval_count);
  assert.ok(last.total_duration >= last.prompt_eval_duration + last.eval_duration);
});

test("a generation, and one that asks for nothing", async () => {
  const whole = await client.generate({ model, prompt: "A hen", options: greedy, think: false });
  let text = "";
  for await (const part of await client.generate({ model, prompt: "A hen", options: greedy, think: false, stream: true })) text += part.response;
  assert.equal(text, whole.response);
  assert.equal((await client.generate({ model, prompt: "", keep_alive: "10m" })).done_reason, "load");
});

test("a model that marks no reasoning answers as it is when asked to think", async () => {
  const plain = await client.chat({ model, messages, options: greedy });
  for (const think of [true, "low"]) {
    const whole = await client.chat({ model, messages, options: greedy, think });
    assert.equal(whole.message.content, plain.message.content);
    assert.ok(!whole.message.thinking);
    let text = "";
    for await (const part of await client.chat({ model, messages, options: greedy, think, stream: true })) {
      text += part.message.content;
      assert.ok(!part.message.thinking);
    }
    assert.equal(text, plain.message.content);
  }
  assert.ok(!(await client.show({ model })).capabilities.includes("thinking"));
  await assert.rejects(client.generate({ model, prompt: "A hen", raw: true, think: true }), (error) => error.status_code === 400 && /'think' is for the chat template/.test(error.error));
});

test("an answer of a schema", async () => {
  const format = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
  const made = await client.chat({ model, messages, format, options: { num_predict: 60, seed: 1 } });
  assert.equal(typeof JSON.parse(made.message.content).ok, "boolean");
});

test("a function is called with an object", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "get_weather", description: "Current weather", parameters } }];
  const question = [{ role: "user", content: "What is the weather in Paris?" }];
  const made = await client.chat({ model, messages: question, tools, options: { temperature: 0, num_predict: 60 } });
  const [call] = made.message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.equal(typeof call.function.arguments.city, "string");
  const result = { role: "tool", content: "sunny", tool_name: call.function.name };
  assert.ok((await client.chat({ model, messages: [...question, made.message, result], tools, options: greedy })).done);
});

test("vectors", async () => {
  const { embeddings } = await client.embed({ model, input: ["a fox", "a hen"] });
  assert.ok(Math.abs(Math.hypot(...embeddings[0]) - 1) < 1e-3);
  assert.deepEqual((await client.embeddings({ model, prompt: "a hen" })).embedding, embeddings[1]);
});

test("models are listed, shown, and pulled elsewhere", async () => {
  assert.ok((await client.ps()).models[0].context_length > 0);
  assert.ok((await client.show({ model })).capabilities.includes("completion"));
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  assert.equal((await client.pull({ model })).status, "success");
  const steps = [];
  for await (const step of await client.pull({ model, stream: true })) steps.push(step.status);
  assert.equal(steps.at(-1), "success");
  const elsewhere = (error) => error.status_code === 404 && /folio pull/.test(error.error);
  await assert.rejects(client.pull({ model: "llama3.2" }), elsewhere);
  await assert.rejects(client.pull({ model: "llama3.2", stream: true }), elsewhere);
  await assert.rejects(client.delete({ model }), (error) => error.status_code === 403);
});

test("errors name the option", async () => {
  await assert.rejects(client.chat({ model, messages, options: { mirostat: 2 } }), (error) => {
    assert.equal(error.status_code, 400);
    assert.match(error.error, /options\.mirostat/);
    return true;
  });
  await assert.rejects(client.chat({ model: "nobody", messages, stream: true }), (error) => error.status_code === 404);
});

test("an aborted stream ends the request", async () => {
  const stream = await client.chat({ model, messages, stream: true, options: { num_predict: 400 } });
  await assert.rejects(async () => {
    for await (const _ of stream) stream.abort();
  });
  const deadline = Date.now() + 20_000;
  for (;;) {
    const page = await (await fetch(`${server.url}/metrics`)).text();
    if (/vllm:num_requests_running\{[^}]*\} 0/.test(page)) break;
    assert.ok(Date.now() < deadline, "it still runs");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
});
