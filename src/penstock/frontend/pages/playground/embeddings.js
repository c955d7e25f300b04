// Compares texts with an embedding model: how similar each is to each other.
import { html, useState } from "../vendor/preact.js";
import { fetchJSON } from "../shared/api.js";
import { formatCount, formatSeconds, Icon } from "../shared/shell.js";

const MAX_TEXTS = 24;
const FIRST = "A river runs to the sea\nWater flows downhill\nThe bank raised its rates";

function similarity(one, other) {
  let dot = 0;
  let first = 0;
  let second = 0;
  for (let i = 0; i < one.length; i += 1) {
    dot += one[i] * other[i];
    first += one[i] * one[i];
    second += other[i] * other[i];
  }
  return dot / Math.sqrt(first * second || 1);
}

function Matrix({ texts, vectors }) {
  return html`<div class="table" tabindex="0" role="region" aria-label="Similarities"><table class="matrix">
    <thead><tr><th><span class="sr">Text</span></th>${texts.map((text, i) => html`<th scope="col" title=${text}>${i + 1}</th>`)}</tr></thead>
    <tbody>${texts.map((text, i) => html`<tr><th scope="row" title=${text}><b>${i + 1}</b>${text}</th>
      ${texts.map((_, j) => {
        const value = similarity(vectors[i], vectors[j]);
        return html`<td><i style=${{ opacity: Math.max(0, value) * 0.75 }}></i><span>${value.toFixed(2)}</span></td>`;
      })}</tr>`)}</tbody>
  </table></div>`;
}

export function Embeddings({ server }) {
  const [text, setText] = useState(FIRST);
  const [state, setState] = useState({});
  const texts = text.split("\n").map((line) => line.trim()).filter(Boolean);
  const many = texts.length > MAX_TEXTS;
  const compare = async () => {
    setState({ busy: true });
    const began = performance.now();
    try {
      const answer = await fetchJSON("/v1/embeddings", { body: { model: server.model, input: texts } });
      const vectors = [...answer.data].sort((one, other) => one.index - other.index).map((entry) => entry.embedding);
      setState({ texts, vectors, tokens: answer.usage.prompt_tokens, seconds: (performance.now() - began) / 1000 });
    } catch (error) {
      setState({ problem: error.message });
    }
  };
  return html`<div class="scroll"><div class="thread completion">
    <label for="texts">Texts, one a line</label>
    <textarea id="texts" rows="6" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    <div class="row end">
      ${many && html`<small>At most ${MAX_TEXTS} texts; there are ${texts.length}</small>`}
      <button type="button" class="btn primary" disabled=${!texts.length || many || state.busy} onClick=${compare}><${Icon} name="bolt" />Compare</button>
    </div>
    <div role="status">${state.problem && html`<div class="problem">${state.problem}</div>`}</div>
    ${state.vectors && html`<${Matrix} ...${state} />
      <ul class="stats embedded"><li>${formatSeconds(state.seconds)}</li><li>${formatCount(state.tokens)} tokens</li><li>${state.vectors[0].length} numbers in a vector</li><li>cosine similarity</li></ul>`}
  </div></div>`;
}
