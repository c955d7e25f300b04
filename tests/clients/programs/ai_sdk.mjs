// The Vercel AI SDK against a server. Run by test_matrix.py in a folder that has it installed; its arguments are the
// server's URL and the model.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(from.resolve(name)));
const { generateText, streamText, tool, stepCountIs, Output } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const model = provider(name);
const tools = {
  get_weather: tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]), unit: z.enum(["C", "F"]) }),
    execute: async ({ city, unit }) => `It is 21 degrees ${unit} and raining in ${city}.`,
  }),
};
const common = { model, tools, temperature: 0, maxOutputTokens: 200, maxRetries: 0, prompt: "What is the weather in Paris?" };

for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
  const { toolCalls, toolResults } = await generateText({ ...common, toolChoice });
  assert.equal(toolCalls.length, 1);
  assert.equal(toolCalls[0].toolName, "get_weather");
  assert.match(toolResults[0].output, /^It is 21 degrees/);
}
const stream = streamText({ ...common, toolChoice: "required" });
const kinds = new Set();
for await (const part of stream.fullStream) {
  assert.notEqual(part.type, "error", JSON.stringify(part));
  kinds.add(part.type);
}
for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "finish"]) {
  assert.ok(kinds.has(kind), `${kind} is missing of ${[...kinds]}`);
}
assert.equal((await stream.toolCalls).length, 1);
// Two steps: a call, and an answer from its result.
const steps = await generateText({
  ...common,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
assert.equal(steps.steps.length, 2);
assert.ok(steps.text);
const { output } = await generateText({
  model,
  temperature: 0,
  maxOutputTokens: 200,
  maxRetries: 0,
  prompt: "Anna is 31 years old.",
  output: Output.object({ schema: z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) }) }),
});
assert.equal(typeof output.age, "number");
