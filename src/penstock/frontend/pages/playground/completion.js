// Completion: a text, and what the model writes after it.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { CopyButton, Icon, Tool } from "../shared/shell.js";
import { AnswerBody, Stats, useLive } from "./thread.js";

function Output({ version, live, settings, schema, actions, index, count }) {
  useLive(live);
  const [tokens, setTokens] = useState(Boolean(settings.logprobs));
  const busy = Boolean(live);
  const hasTokens = version.tokens?.length > 0;
  return html`<article class="message assistant output" aria-label="Output ${index + 1}" aria-busy=${busy}>
    ${count > 1 && html`<small>${index + 1} of ${count}</small>`}
    <${AnswerBody} ...${{ version, busy, schema, tokens }} plain=${true} onBranch=${(text) => actions.branchOutput(text)} />
    ${version.error && html`<div class="problem" role="alert">${version.error}</div>`}
    ${!busy &&
    html`<footer>
      <button type="button" class="btn small" onClick=${() => actions.append(version)}><${Icon} name="plus" />Append to the text</button>
      <${CopyButton} text=${version.text} label="Copy the output" />
      <${Tool} icon="tokens" data-tokens label=${hasTokens ? "Show tokens (Alt+T)" : "Tokens: turn on Record probabilities, then run again"} aria-pressed=${tokens && hasTokens}
        disabled=${!hasTokens} onClick=${() => setTokens(!tokens)} />
      <${Stats} version=${version} />
    </footer>`}
  </article>`;
}

export function Completion({ conversation, live, schema, actions }) {
  const field = useRef();
  useEffect(() => {
    const { current } = field;
    current.style.height = "auto";
    current.style.height = `${Math.min(520, Math.max(116, current.scrollHeight + 4))}px`;
  }, [conversation.prompt, conversation.id]);
  const keydown = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || live) return;
    event.preventDefault();
    actions.run();
  };
  return html`<div class="completion">
    <label for="prompt">Text</label>
    <textarea id="prompt" ref=${field} placeholder="Write the beginning; the model goes on" value=${conversation.prompt}
      onInput=${(event) => actions.setPrompt(event.target.value)} onKeyDown=${keydown}></textarea>
    <div class="row end">
      ${live
        ? html`<button type="button" class="btn" onClick=${actions.stop}><${Icon} name="stop" />Stop</button>`
        : html`<button type="button" class="btn primary" disabled=${!conversation.prompt} onClick=${actions.run}><${Icon} name="bolt" />Run</button>`}
    </div>
    ${conversation.outputs.map((version, i) => html`<${Output} key=${i} ...${{ version, live, schema, actions }} index=${i} count=${conversation.outputs.length} settings=${conversation.settings} />`)}
  </div>`;
}
