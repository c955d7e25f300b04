// The messages of a chat.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { CodeBlock } from "../shared/code.js";
import { CopyButton, formatCount, formatSeconds, Icon, Tool } from "../shared/shell.js";
import { PAUSE_TOKENS, speedOf } from "./generate.js";
import { Markdown } from "./markdown-view.js";
import { checkSchema, readJSON } from "./schema.js";
import { TokenView } from "./tokens.js";

// Renders again when a stream has brought something.
export function useLive(live) {
  const [, set] = useState(0);
  useEffect(() => {
    if (!live) return undefined;
    const listener = () => set((count) => count + 1);
    live.listeners.add(listener);
    return () => live.listeners.delete(listener);
  }, [live]);
}

export function Stats({ version }) {
  const { stats, finish } = version;
  const speed = speedOf(stats);
  const tokens = stats.output ?? stats.events;
  const parts = [
    stats.ttft !== undefined && [`TTFT ${formatSeconds(stats.ttft)}`, "Time to the first token"],
    speed && [`${speed.toFixed(speed < 10 ? 1 : 0)} tok/s`, "Tokens per second after the first one"],
    tokens > 0 && [`${formatCount(tokens)} tokens`, "Output tokens"],
    stats.prompt !== undefined && [`${formatCount(stats.cached)} of ${formatCount(stats.prompt)} prompt tokens cached`, "Found in the prefix cache"],
    {
      paused: [`paused after ${formatCount(PAUSE_TOKENS)} tokens`, "Go on continues it; Max tokens sets another length"],
      length: ["cut off at max tokens", "The answer reached its limit"],
      context: ["cut off: the context is full", "The conversation and the answer have as many tokens as the model can see"],
      stopped: ["stopped", "You stopped it"],
    }[finish],
    stats.leftOut && [`${stats.leftOut === 1 ? "oldest turn" : `${stats.leftOut} oldest turns`} left out`, "The conversation is longer than the context: the model did not see its beginning"],
  ];
  return html`<ul class="stats" aria-label="Statistics">${parts.filter(Boolean).map(([text, title]) => html`<li title=${title}>${text}</li>`)}</ul>`;
}

export function Versions({ current, count, onChange }) {
  if (count < 2) return null;
  return html`<span class="versions" role="group" aria-label="Answers">
    <${Tool} icon="left" label="Previous answer" disabled=${current === 0} onClick=${() => onChange(current - 1)} />
    <span>${current + 1} / ${count}</span>
    <${Tool} icon="right" label="Next answer" disabled=${current === count - 1} onClick=${() => onChange(current + 1)} />
  </span>`;
}

function Editor({ text, label, action, onDone, onCancel }) {
  const [value, set] = useState(text);
  const field = useRef();
  useEffect(() => field.current.focus(), []);
  const keydown = (event) => {
    if (event.key === "Escape") onCancel();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onDone(value);
    else return;
    event.stopPropagation();
  };
  return html`<div class="editor">
    <textarea ref=${field} aria-label=${label} rows=${Math.min(16, Math.max(3, value.split("\n").length + 1))} value=${value}
      onInput=${(event) => set(event.target.value)} onKeyDown=${keydown}></textarea>
    <div class="row end"><button type="button" class="btn small" onClick=${onCancel}>Cancel</button>
    <button type="button" class="btn small primary" onClick=${() => onDone(value)}>${action}</button></div>
  </div>`;
}

export function Validation({ text, schema }) {
  const { value, problem } = readJSON(text);
  const problems = problem ? [["", problem]] : checkSchema(value, schema);
  if (!problems.length) return html`<div class="checked"><${Icon} name="check" />Matches the schema</div>`;
  return html`<div class="checked wrong"><${Icon} name="warn" />Does not match the schema</div>
    <ul class="problems">${problems.map(([path, what]) => html`<li><code>${path}</code> ${what}</li>`)}</ul>`;
}

function Call({ call, schema, busy, answered, onAnswer }) {
  const [result, setResult] = useState("");
  const read = readJSON(call.arguments);
  const text = read.problem ? call.arguments : JSON.stringify(read.value, null, 2);
  return html`<div class="call">
    <div class="name"><${Icon} name="wrench" /><code>${call.name}</code></div>
    <${CodeBlock} text=${text} lang="json" />
    ${!busy && schema && html`<${Validation} text=${call.arguments} schema=${schema} />`}
    ${!busy && !answered &&
    html`<form class="row" onSubmit=${(event) => (event.preventDefault(), onAnswer(result))}>
      <input type="text" class="mono" aria-label="Result of ${call.name}" placeholder="Result of the call" value=${result} onInput=${(event) => setResult(event.target.value)} />
      <button class="btn" disabled=${!result}>Send result</button>
    </form>`}
  </div>`;
}

// The answer's text, or its tokens.
export function AnswerBody({ version, busy, tokens, schema, plain, onBranch }) {
  if (tokens && version.tokens?.length) return html`<${TokenView} version=${version} onBranch=${busy ? null : onBranch} />`;
  const text = plain ? html`<div class="plain">${version.text}</div>` : schema && !busy ? html`<${CodeBlock} text=${version.text} lang="json" />` : html`<${Markdown} text=${version.text} />`;
  return html`${version.reasoning && html`<details class="reasoning" open=${busy && !version.text}><summary>Reasoning</summary><${Markdown} text=${version.reasoning} /></details>`}
    ${version.text && text}
    ${!busy && schema && version.text && html`<${Validation} text=${version.text} schema=${schema} />`}`;
}

export function Answer({ message, actions, settings, schema, tools, last }) {
  useLive(message.live);
  const [editing, setEditing] = useState(false);
  const [tokens, setTokens] = useState(Boolean(settings.logprobs));
  const version = message.versions[message.current];
  const busy = Boolean(message.live);
  const hasTokens = version.tokens?.length > 0;
  const schemaOf = (call) => tools?.find((tool) => tool.function?.name === call.name)?.function?.parameters;
  const empty = busy && !version.text && !version.reasoning && !version.calls.length;
  return html`<article class="message assistant" aria-label="Answer" aria-busy=${busy}>
    ${empty && html`<div class="thinking" aria-hidden="true"><i></i><i></i><i></i></div>`}
    ${editing
      ? html`<${Editor} text=${version.text} label="Edit the answer" action="Save" onCancel=${() => setEditing(false)}
          onDone=${(text) => (setEditing(false), actions.editAnswer(message, text))} />`
      : html`<${AnswerBody} ...${{ version, busy, schema }} tokens=${tokens} onBranch=${(text) => actions.branch(message, text)} />`}
    ${version.calls.map((call, i) => html`<${Call} key=${i} ...${{ call, busy }} schema=${schemaOf(call)} answered=${!last} onAnswer=${(text) => actions.answerCall(call, text)} />`)}
    ${version.error && html`<div class="problem" role="alert">${version.error}</div>`}
    ${!busy && !editing &&
    html`<footer>
      <${Versions} current=${message.current} count=${message.versions.length} onChange=${(current) => actions.choose(message, current)} />
      <${CopyButton} text=${version.text} label="Copy the answer" />
      <${Tool} icon="redo" label="Regenerate (Alt+R)" onClick=${() => actions.regenerate(message)} />
      <${Tool} icon="edit" label="Edit the answer" onClick=${() => setEditing(true)} />
      ${last && !["stop", "context"].includes(version.finish) && version.text && html`<${Tool} icon="right" label="Continue the answer" text=${["length", "paused"].includes(version.finish) && "Go on"} onClick=${() => actions.branch(message, version.text)} />`}
      <${Tool} icon="tokens" label=${hasTokens ? "Show tokens (Alt+T)" : "Tokens: turn on Record probabilities, then regenerate"} data-tokens aria-pressed=${tokens && hasTokens}
        disabled=${!hasTokens} onClick=${() => setTokens(!tokens)} />
      <${Stats} version=${version} />
    </footer>`}
  </article>`;
}

export function Question({ message, actions, busy }) {
  const [editing, setEditing] = useState(false);
  const tool = message.role === "tool";
  return html`<article class="message ${message.role}" aria-label=${tool ? "Result of a tool" : "Question"}>
    ${editing
      ? html`<${Editor} text=${message.content} label="Edit the question" action="Send" onCancel=${() => setEditing(false)}
          onDone=${(text) => (setEditing(false), actions.editQuestion(message, text))} />`
      : html`<div class="bubble">${tool && html`<small>Tool result</small>`}${message.content}</div>
          <div class="beside">${!busy && html`<${Tool} icon="edit" label="Edit and send again" onClick=${() => setEditing(true)} />`}
          <${CopyButton} text=${message.content} label="Copy" /></div>`}
  </article>`;
}
