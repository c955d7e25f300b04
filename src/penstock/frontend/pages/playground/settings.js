// The settings of a request: what the panel shows, and the body that they make. A setting that is empty is not sent.
import { readJSON } from "./schema.js";

// kind: number, text, lines (one value a line), ids, json, check, choice. `in`: chat or completion if only there.
export const GROUPS = [
  {
    title: "Sampling",
    open: true,
    settings: [
      { name: "temperature", label: "Temperature", kind: "number", least: 0, most: 2, step: 0.05, hint: "0 always takes the most likely token" },
      { name: "top_p", label: "Top p", kind: "number", least: 0, most: 1, step: 0.01, hint: "Keep the most likely tokens that add up to this probability" },
      { name: "top_k", label: "Top k", kind: "number", least: 0, step: 1, hint: "Keep this many tokens; 0 keeps all" },
      { name: "min_p", label: "Min p", kind: "number", least: 0, most: 1, step: 0.01, hint: "Drop tokens below this share of the most likely one" },
      { name: "seed", label: "Seed", kind: "number", step: 1, fallback: "random", hint: "The same seed gives the same answer" },
    ],
  },
  {
    title: "Length",
    open: true,
    settings: [
      { name: "max_tokens", label: "Max tokens", kind: "number", least: 0, step: 1, fallback: "to the end", hint: "Longest answer; without it, a chat pauses after 2048 tokens" },
      { name: "min_tokens", label: "Min tokens", kind: "number", least: 0, step: 1, hint: "Shortest answer" },
      { name: "n", label: "Answers", kind: "number", least: 1, step: 1, fallback: 1, hint: "Answers to each prompt (n)" },
      { name: "stop", label: "Stop at", kind: "lines", hint: "One text a line; \\n is a line break" },
      { name: "include_stop_str_in_output", label: "Keep the stop text", kind: "check" },
      { name: "ignore_eos", label: "Ignore the end token", kind: "check" },
    ],
  },
  {
    title: "Penalties and bias",
    settings: [
      { name: "repetition_penalty", label: "Repetition", kind: "number", least: 0.5, most: 2, step: 0.01, hint: "Above 1: tokens that occurred are less likely" },
      { name: "presence_penalty", label: "Presence", kind: "number", least: -2, most: 2, step: 0.05, hint: "Subtracted from tokens that the answer has" },
      { name: "frequency_penalty", label: "Frequency", kind: "number", least: -2, most: 2, step: 0.05, hint: "Subtracted for each time that the answer has a token" },
      { name: "logit_bias", label: "Logit bias", kind: "json", rows: 2, placeholder: '{"1234": -5}', hint: "By token id, from -100 to 100" },
    ],
  },
  {
    title: "Tools",
    in: "chat",
    settings: [
      { name: "tools", label: "Tools", kind: "json", rows: 8, array: true, example: "tools", hint: "A JSON array of functions, as in OpenAI's API" },
      { name: "tool_choice", label: "Tool choice", kind: "choice", choices: ["auto", "required", "none"] },
      { name: "no_parallel_tool_calls", label: "One call at a time", kind: "check" },
    ],
  },
  {
    title: "Structured output",
    settings: [
      { name: "format", label: "Format", kind: "choice", choices: ["text", "JSON schema", "any JSON", "regex", "choice", "grammar"] },
      { name: "schema", label: "JSON schema", kind: "json", rows: 8, example: "schema", when: ["format", "JSON schema"] },
      { name: "regex", label: "Regular expression", kind: "text", mono: true, when: ["format", "regex"] },
      { name: "choice", label: "Choices", kind: "lines", when: ["format", "choice"], hint: "One a line" },
      { name: "grammar", label: "Grammar (Lark or GBNF)", kind: "area", rows: 6, when: ["format", "grammar"] },
    ],
  },
  {
    title: "Tokens",
    settings: [
      { name: "logprobs", label: "Record probabilities", kind: "check", hint: "For the view of tokens" },
      { name: "top_logprobs", label: "Alternatives", kind: "number", least: 0, step: 1, fallback: 5, hint: "For each token" },
      { name: "keep_special_tokens", label: "Show special tokens", kind: "check" },
    ],
  },
  {
    title: "More",
    settings: [
      { name: "reasoning_effort", label: "Reasoning effort", kind: "choice", choices: ["", "none", "low", "medium", "high"], in: "chat" },
      { name: "chat_template_kwargs", label: "Template variables", kind: "json", rows: 2, placeholder: '{"enable_thinking": false}', in: "chat" },
      { name: "stop_token_ids", label: "Stop token ids", kind: "ids", hint: "Separated by commas" },
      { name: "echo", label: "Echo the prompt", kind: "check", in: "completion" },
      { name: "priority", label: "Priority", kind: "number", step: 1, fallback: 0, hint: "A lower one runs sooner" },
      { name: "cache_salt", label: "Cache salt", kind: "text", hint: "Only requests with the same salt share cached prompts" },
    ],
  },
];

export const EXAMPLES = {
  tools: JSON.stringify(
    [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "The weather of a city",
          parameters: {
            type: "object",
            properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
            required: ["city"],
            additionalProperties: false,
          },
        },
      },
    ],
    null,
    2,
  ),
  schema: JSON.stringify(
    {
      type: "object",
      properties: { name: { type: "string" }, population: { type: "integer", minimum: 0 }, capital: { type: "boolean" } },
      required: ["name", "population", "capital"],
      additionalProperties: false,
    },
    null,
    2,
  ),
};

export function settingsOf(mode) {
  return GROUPS.filter((group) => !group.in || group.in === mode).flatMap((group) =>
    group.settings.filter((setting) => !setting.in || setting.in === mode),
  );
}

// What is wrong with a setting's text, or "".
export function problemOf(setting, value) {
  if (value === undefined || value === "") return "";
  if (setting.kind === "json") {
    const { value: read, problem } = readJSON(value);
    if (problem) return problem;
    if (setting.array && !Array.isArray(read)) return "must be a JSON array";
    if (!setting.array && (typeof read !== "object" || read === null || Array.isArray(read))) return "must be a JSON object";
  }
  if (setting.kind === "number") {
    if (!Number.isFinite(Number(value))) return "must be a number";
    if (setting.step === 1 && !Number.isInteger(Number(value))) return "must be a whole number";
  }
  if (setting.kind === "ids" && !/^\s*\d+(\s*,\s*\d+)*\s*$/.test(value)) return "must be whole numbers with commas between them";
  return "";
}

function valueOf(setting, value) {
  switch (setting.kind) {
    case "number":
      return Number(value);
    case "json":
      return JSON.parse(value);
    case "lines":
      return value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    case "ids":
      return value.split(",").map(Number);
    default:
      return value;
  }
}

const FORMATS = {
  "JSON schema": (read) => ({ response_format: { type: "json_schema", json_schema: { name: "answer", schema: read.schema ?? {} } } }),
  "any JSON": () => ({ response_format: { type: "json_object" } }),
  regex: (read) => ({ structured_outputs: { regex: read.regex ?? "" } }),
  choice: (read) => ({ structured_outputs: { choice: read.choice ?? [] } }),
  grammar: (read) => ({ structured_outputs: { grammar: read.grammar ?? "" } }),
};
const FORMAT_PARTS = ["format", "schema", "regex", "choice", "grammar"];

// The parameters of a request. Throws an Error that names a setting that is wrong.
export function parameters(settings, mode) {
  const read = {};
  for (const setting of settingsOf(mode)) {
    const value = settings[setting.name];
    if (value === undefined || value === "" || value === false) continue;
    if (setting.when && settings[setting.when[0]] !== setting.when[1]) continue;
    const problem = problemOf(setting, value);
    if (problem) throw new Error(`${setting.label}: ${problem}`);
    read[setting.name] = valueOf(setting, value);
  }
  const body = Object.fromEntries(Object.entries(read).filter(([name]) => !FORMAT_PARTS.includes(name)));
  Object.assign(body, FORMATS[read.format]?.(read));
  const { no_parallel_tool_calls: single, keep_special_tokens: special, logprobs, top_logprobs: top = 5 } = read;
  for (const name of ["no_parallel_tool_calls", "keep_special_tokens", "logprobs", "top_logprobs"]) delete body[name];
  if (!body.tools?.length) for (const name of ["tools", "tool_choice"]) delete body[name];
  else if (single) body.parallel_tool_calls = false;
  if (special) body.skip_special_tokens = false;
  if (logprobs) Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: top } : { logprobs: top });
  return body;
}

// The messages of a chat, as the API takes them.
export function wireMessages(conversation, end = conversation.messages.length) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const message of conversation.messages.slice(0, end)) {
    if (message.role === "tool") messages.push({ role: "tool", tool_call_id: message.call, content: message.content });
    else if (message.role !== "assistant") messages.push({ role: message.role, content: message.content });
    else {
      const version = message.versions[message.current];
      const calls = version.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      messages.push({ role: "assistant", content: version.text, ...(calls.length && { tool_calls: calls }) });
    }
  }
  return messages;
}
