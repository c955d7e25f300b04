// The dialogs of the playground: a request as code, and the shortcuts.
import { html, useState } from "../vendor/preact.js";
import { Code } from "../shared/code.js";
import { readKey } from "../shared/api.js";
import { CopyButton, Dialog } from "../shared/shell.js";

const SHORTCUTS = [
  ["Enter", "Send, or run a completion with Ctrl"],
  ["Shift Enter", "New line"],
  ["Escape", "Stop the answer"],
  ["Alt N", "New conversation"],
  ["Alt R", "Regenerate the last answer"],
  ["Alt T", "Tokens of the last answer"],
  ["Alt S", "Settings"],
  ["Alt C", "Copy as code"],
  ["Alt ↑  Alt ↓", "Previous, next conversation"],
  ["?", "This list"],
];

export function Shortcuts({ onClose }) {
  return html`<${Dialog} title="Keyboard" onClose=${onClose}>
    <dl class="shortcuts">${SHORTCUTS.map(([keys, what]) => html`<div><dt>${keys.split("  ").map((chord) => html`<span>${chord.split(" ").map((key) => html`<kbd>${key}</kbd>`)}</span>`)}</dt><dd>${what}</dd></div>`)}</dl>
  <//>`;
}

// A text for a shell, in single quotes.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(path, body) {
  const key = readKey() ? `  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\\n` : "";
  return `curl ${location.origin}${path} \\\n  -H "Content-Type: application/json" \\\n${key}  -d ${quoted(JSON.stringify(body, null, 2))}`;
}

// A JSON value as Python.
function literal(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (!parts.length) return open + close;
  const flat = open + parts.join(", ") + close;
  if (flat.length < 70 && !flat.includes("\n")) return flat;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}

const OPENAI = new Set(
  "model messages prompt temperature top_p n stop seed max_tokens presence_penalty frequency_penalty logit_bias logprobs top_logprobs tools tool_choice parallel_tool_calls response_format reasoning_effort echo stream".split(" "),
);

function python(path, body) {
  const chat = path.includes("chat");
  const lines = Object.entries(body).filter(([name]) => OPENAI.has(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},\n`);
  const key = readKey() ? `os.environ["PENSTOCK_API_KEY"]` : `"none"`;
  const show = chat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${readKey() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${key})
stream = client.${chat ? "chat.completions" : "completions"}.create(
${lines.join("")}    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(${show} or "", end="", flush=True)
`;
}

export function CodeDialog({ path, body, problem, onClose }) {
  const [kind, setKind] = useState("curl");
  const text = problem ? "" : kind === "curl" ? curl(path, body) : python(path, body);
  return html`<${Dialog} title="This request as code" onClose=${onClose}>
    ${problem
      ? html`<div class="problem">${problem}</div>`
      : html`<div class="row tabs" role="group" aria-label="Language">
            ${[["curl", "curl"], ["python", "Python"]].map(([name, label]) => html`<button type="button" class="tool" aria-pressed=${kind === name} onClick=${() => setKind(name)}>${label}</button>`)}
            <span class="space"></span><${CopyButton} text=${text} label="Copy" />
          </div>
          <div class="snippet"><${Code} key=${kind} text=${text} lang=${kind === "curl" ? "bash" : "python"} /></div>`}
  <//>`;
}
