// The Vercel AI SDK against a server, whatever its version. Run by test_matrix.py in a folder that has it installed.
import assert from "node:assert";
import { assertEmbeddings, chatModel, embedder, embedderServer, load, server, texts } from "./arguments.mjs";

const { embedMany, generateText, streamText, tool, Output, ...sdk } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const compatible = (baseURL) => createOpenAICompatible({ name: "penstock", baseURL, supportsStructuredOutputs: true });
const tools = {
  get_weather: tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]), unit: z.enum(["C", "F"]) }),
    execute: async ({ city, unit }) => `It is 21 degrees ${unit} and raining in ${city}.`,
  }),
};


async function check(model) {
  const limits = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const common = { ...limits, prompt: "What is the weather in Paris?" };
  const plain = await generateText(common);
  assert.ok(plain.text);
  assert.ok(plain.usage.inputTokens > 5 && plain.usage.outputTokens > 0, JSON.stringify(plain.usage));
  let text = "";
  for await (const part of streamText(common).textStream) text += part;
  assert.equal(text, plain.text);
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const { toolCalls, toolResults } = await generateText({ ...common, tools, toolChoice });
    assert.equal(toolCalls.length, 1);
    assert.equal(toolCalls[0].toolName, "get_weather");
    assert.match(toolResults[0].output, /^It is 21 degrees/);
  }
  const stream = streamText({ ...common, tools, toolChoice: "required" });
  const kinds = new Set();
  for await (const part of stream.stream ?? stream.fullStream) {
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
    tools,
    stopWhen: (sdk.isStepCount ?? sdk.stepCountIs)(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  assert.equal(steps.steps.length, 2);
  assert.ok(steps.text);
  const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
  const { output } = await generateText({ ...limits, prompt: "Anna is 31 years old.", output: Output.object({ schema }) });
  assert.equal(typeof output.age, "number");
}

const account = { baseURL: `${server}/v1`, apiKey: "unused" };
const openai = createOpenAI(account);
for (const model of [
  compatible(`${server}/v1`)(chatModel),
  openai.chat(chatModel),
  openai.responses(chatModel),
  createAnthropic(account)(chatModel),
]) {
  await check(model).catch((error) => {
    throw new Error(`${model.provider} ${model.constructor.name}`, { cause: error });
  });
}
for (const provider of [compatible(`${embedderServer}/v1`), createOpenAI({ ...account, baseURL: `${embedderServer}/v1` })]) {
  const model = (provider.embeddingModel ?? provider.textEmbeddingModel)(embedder);
  assertEmbeddings((await embedMany({ model, values: texts, maxRetries: 0 })).embeddings);
}
