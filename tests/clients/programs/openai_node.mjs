// OpenAI's package for Node, whatever its version: chat, completions, responses, embeddings, tools, files and batches.
// Run by test_matrix.py in a folder that has it installed.
import assert from "node:assert";
import { assertEmbeddings, chatModel as model, embedder, embedderServer, load, server, texts } from "./arguments.mjs";

const { default: OpenAI, toFile } = await load("openai");
const { zodResponseFormat, zodTextFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const greedy = { model, temperature: 0 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

const whole = await client.chat.completions.create({ ...greedy, messages, max_tokens: 20 });
let text = "";
for await (const chunk of await client.chat.completions.create({ ...greedy, messages, max_tokens: 20, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.ok(text);
assert.equal(text, whole.choices[0].message.content);
const runner = client.chat.completions.stream({ ...greedy, messages, max_tokens: 20 });
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, text);
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({ ...greedy, messages, max_tokens: 60, tools, tool_choice: "required" });
assert.ok(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city);
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const parsed = await client.chat.completions.parse({ ...greedy, messages, response_format: zodResponseFormat(City, "city") });
assert.ok(City.parse(parsed.choices[0].message.parsed));
let completed = "";
const prompt = "The capital of France is";
for await (const chunk of await client.completions.create({ ...greedy, prompt, max_tokens: 8, stream: true })) {
  completed += chunk.choices[0]?.text ?? "";
}
assert.match(completed, /Paris/);

const fields = { ...greedy, input: "Name a river.", max_output_tokens: 20 };
const first = await client.responses.create(fields);
let streamed = "";
for await (const event of await client.responses.create({ ...fields, stream: true })) {
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
assert.ok(streamed);
assert.equal(streamed, first.output_text);
assert.equal((await client.responses.stream(fields).finalResponse()).output_text, streamed);
const again = await client.responses.create({ ...fields, input: "Another.", previous_response_id: first.id });
assert.equal(again.previous_response_id, first.id);
assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
const answered = await client.responses.create({
  ...fields,
  max_output_tokens: 60,
  tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
  tool_choice: "required",
});
assert.equal(answered.output[0].type, "function_call");
const inSchema = await client.responses.parse({ ...fields, max_output_tokens: 60, text: { format: zodTextFormat(City, "city") } });
assert.ok(City.parse(inSchema.output_parsed));
await client.responses.delete(first.id);

const vectors = new OpenAI({ baseURL: `${embedderServer}/v1`, apiKey: "unused", maxRetries: 0 });
for (const more of [{}, { encoding_format: "float" }]) {
  assertEmbeddings((await vectors.embeddings.create({ model: embedder, input: texts, ...more })).data.map((row) => row.embedding));
}

const lines = [0, 1, 2, 3].map((i) =>
  JSON.stringify({ custom_id: `${i}`, method: "POST", url: "/v1/responses", body: { input: "Hi", max_output_tokens: 5 } }),
);
const file = await client.files.create({
  file: await toFile(Buffer.from(`${lines.join("\n")}\n`), "in.jsonl"),
  purpose: "batch",
});
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/responses", completion_window: "24h" });
for (const end = Date.now() + 60000; batch.status !== "completed"; batch = await client.batches.retrieve(batch.id)) {
  assert.ok(Date.now() < end && ["validating", "in_progress", "finalizing"].includes(batch.status), batch.status);
  await new Promise((done) => setTimeout(done, 50));
}
const output = await (await client.files.content(batch.output_file_id)).text();
assert.deepEqual(output.trim().split("\n").map((line) => JSON.parse(line).custom_id).sort(), ["0", "1", "2", "3"]);
const listed = [];
for await (const found of client.batches.list()) listed.push(found.id);
assert.ok(listed.includes(batch.id));
assert.ok((await client.files.delete(file.id)).deleted);
await assert.rejects(client.chat.completions.create({ ...greedy, messages, max_tokens: -1 }), OpenAI.BadRequestError);
