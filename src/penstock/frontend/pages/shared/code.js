// A block of code. Lines are grouped, so that a block that grows renders only its last group again.
import { Component, html } from "../vendor/preact.js";
import { highlightLine, languageOf } from "./highlight.js";
import { CopyButton } from "./shell.js";

const GROUP = 40; // lines

class Lines extends Component {
  shouldComponentUpdate(next) {
    return next.text !== this.props.text || next.language !== this.props.language || next.state !== this.props.state;
  }

  render({ text, language, state }) {
    const out = [];
    text.split("\n").forEach((line, i) => {
      if (i) out.push("\n");
      const [parts, after] = highlightLine(line, language, state);
      state = after;
      for (const [kind, part] of parts) out.push(kind ? html`<span class=${kind}>${part}</span>` : part);
    });
    return out;
  }
}

export class Code extends Component {
  constructor() {
    super();
    this.groups = [];
  }

  shouldComponentUpdate(next) {
    return next.text !== this.props.text || next.lang !== this.props.lang;
  }

  // The text in groups of lines, each with the highlighter's state before it. Groups before the last are kept.
  divide(text, language) {
    const groups = text.startsWith(this.done ?? "") ? this.groups : [];
    let at = groups.reduce((sum, group) => sum + group.text.length, 0);
    let state = groups.at(-1)?.after ?? "";
    for (;;) {
      const end = nthNewline(text, at, GROUP);
      if (end < 0) break;
      const group = { text: text.slice(at, end + 1), state };
      for (const line of group.text.slice(0, -1).split("\n")) state = highlightLine(line, language, state)[1];
      groups.push({ ...group, after: state });
      at = end + 1;
    }
    this.groups = groups;
    this.done = text.slice(0, at);
    return [...groups, { text: text.slice(at), state }];
  }

  render({ text, lang = "" }) {
    const language = languageOf(lang);
    return html`<pre tabindex="0"><code>${this.divide(text, language).map(
      (group, i) => html`<${Lines} key=${i} text=${group.text} language=${language} state=${group.state} />`,
    )}</code></pre>`;
  }
}

function nthNewline(text, at, count) {
  let end = at - 1;
  for (let i = 0; i < count; i += 1) {
    end = text.indexOf("\n", end + 1);
    if (end < 0) return -1;
  }
  return end;
}

export function CodeBlock({ text, lang }) {
  return html`<figure class="code">
    <figcaption><span>${lang || "text"}</span><${CopyButton} text=${text} label="Copy code" /></figcaption>
    <${Code} text=${text} lang=${lang} />
  </figure>`;
}
