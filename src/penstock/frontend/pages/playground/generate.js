// Sends a request and collects its stream. What has arrived is shown once a frame, not once a token.
import { readEvents, send } from "../shared/api.js";

export function newVersion(text = "") {
  return { text, reasoning: "", calls: [], finish: "", error: "", stats: {}, tokens: [] };
}

// Tells the components that show a version that it has grown.
export class Live {
  constructor() {
    this.listeners = new Set();
    this.waiting = false;
  }

  changed() {
    if (this.waiting) return;
    this.waiting = true;
    const show = () => {
      if (!this.waiting) return;
      this.waiting = false;
      for (const listener of this.listeners) listener();
    };
    if (document.hidden) setTimeout(show, 500);
    else requestAnimationFrame(show);
  }
}

// After so many tokens an answer without max_tokens pauses, as a small model may never end it. A button goes on.
export const PAUSE_TOKENS = 2048;

// Fills `versions`, one for each choice, until the stream ends. Throws only an AbortError.
export async function generate(path, body, versions, live, signal) {
  const began = performance.now();
  const last = {};
  const endless = body.messages && body.max_tokens === undefined; // a chat's answer then ends with the context at the latest
  try {
    const [response, leftOut] = await sendFitting(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
    for (const version of versions) if (leftOut) version.stats.leftOut = leftOut;
    for await (const event of readEvents(response)) {
      if (event.usage) count(versions, event.usage);
      for (const choice of event.choices) {
        const version = versions[choice.index];
        const now = performance.now();
        if (take(version, choice)) {
          version.stats.ttft ??= (now - began) / 1000;
          last[choice.index] = now;
        }
        if (choice.finish_reason) version.finish = choice.finish_reason === "length" && endless ? "context" : choice.finish_reason;
      }
      live.changed();
      if (endless && versions.every((version) => version.finish || version.stats.events >= PAUSE_TOKENS)) {
        for (const version of versions) version.finish ||= "paused";
        break;
      }
    }
  } catch (error) {
    for (const version of versions) version.finish ||= error.name === "AbortError" ? "stopped" : "error";
    if (error.name !== "AbortError") for (const version of versions) version.error = error.message;
    if (error.status === 401) throw error;
  } finally {
    versions.forEach((version, i) => {
      version.stats.seconds = ((last[i] ?? performance.now()) - began) / 1000;
    });
    live.changed();
  }
}

// Sends a request. Of a conversation that is too long for the context, the oldest turns are left out: an eighth of them, at
// least one, until the server takes it. Returns the response, and how many turns were left out.
async function sendFitting(path, body, signal) {
  let { messages } = body;
  for (let leftOut = 0; ; ) {
    try {
      return [await send(path, { body: messages ? { ...body, messages } : body, signal }), leftOut];
    } catch (error) {
      const turns = (messages ?? []).flatMap((message, i) => (message.role === "user" ? [i] : []));
      if (error.code !== "context_length_exceeded" || turns.length < 2) throw error;
      const count = Math.ceil((turns.length - 1) / 8);
      messages = [...messages.slice(0, turns[0]), ...messages.slice(turns[count])];
      leftOut += count;
    }
  }
}

// Adds a choice of an event to its version. Returns whether it has text.
function take(version, choice) {
  const delta = choice.delta ?? { content: choice.text };
  if (delta.content) version.text += delta.content;
  if (delta.reasoning_content) version.reasoning += delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    const known = (version.calls[call.index] ??= { id: "", name: "", arguments: "" });
    if (call.id) known.id = call.id;
    if (call.function?.name) known.name = call.function.name;
    known.arguments += call.function?.arguments ?? "";
  }
  const logprobs = choice.logprobs;
  if (logprobs?.content) for (const entry of logprobs.content) version.tokens.push(chatToken(entry));
  else if (logprobs?.tokens) logprobs.tokens.forEach((token, i) => version.tokens.push(completionToken(logprobs, token, i)));
  if (!(delta.content || delta.reasoning_content || delta.tool_calls)) return false;
  version.stats.events = (version.stats.events ?? 0) + 1;
  return true;
}

function chatToken(entry) {
  const top = entry.top_logprobs.map((one) => ({ text: one.token, bytes: one.bytes, logprob: one.logprob }));
  return { text: entry.token, bytes: entry.bytes, logprob: entry.logprob, top };
}

function completionToken(logprobs, text, i) {
  const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ text: token, logprob }));
  return { text, logprob: logprobs.token_logprobs[i], top };
}

// The usage is that of all choices together; with one choice it is exact for it.
function count(versions, usage) {
  for (const version of versions) {
    version.stats.prompt = usage.prompt_tokens;
    version.stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    version.stats.output = versions.length === 1 ? usage.completion_tokens : (version.stats.events ?? 0);
  }
}

// Output tokens per second after the first one, or null.
export function speedOf(stats) {
  const tokens = stats.output ?? stats.events;
  const seconds = stats.seconds - stats.ttft;
  return tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
}

// The bytes of a token. A completion's token that is part of a character is written as bytes:\xe2\x80.
function bytesOf(token) {
  if (token.bytes) return token.bytes;
  if (/^bytes:(\\x[0-9a-f]{2})+$/.test(token.text)) return token.text.match(/[0-9a-f]{2}(?=\\|$)/g).map((hex) => parseInt(hex, 16));
  return [...new TextEncoder().encode(token.text)];
}

// The text of tokens, or null if it ends within a character.
export function textOf(tokens) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(tokens.flatMap(bytesOf)));
  } catch {
    return null;
  }
}
