// Shows Markdown as elements. A block renders again only if it changed.
import { Component, html } from "../vendor/preact.js";
import { CodeBlock } from "../shared/code.js";
import { BlockReader, parseBlocks, parseInline, tableCells } from "./markdown.js";

// Renders again only if a value of its properties changed.
class Kept extends Component {
  shouldComponentUpdate(next) {
    return Object.keys(next).some((name) => next[name] !== this.props[name]);
  }
}

function inline(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return lineBreaks(part);
    switch (part.type) {
      case "code":
        return html`<code>${part.text}</code>`;
      case "strong":
        return html`<strong>${inline(part.children)}</strong>`;
      case "em":
        return html`<em>${inline(part.children)}</em>`;
      case "strike":
        return html`<s>${inline(part.children)}</s>`;
      case "link":
        return html`<a href=${part.href} target="_blank" rel="noopener noreferrer nofollow">${inline(part.children)}</a>`;
      default:
        return part.text;
    }
  });
}

function lineBreaks(text) {
  if (!text.includes("\n")) return text;
  return text.split("\n").map((line, i) => (i ? [html`<br />`, line] : line));
}

class Text extends Kept {
  render({ text }) {
    return inline(parseInline(text));
  }
}

class Item extends Kept {
  render({ text, depth }) {
    const task = /^\[([ xX])\]\s/.exec(text);
    const body = task ? text.slice(task[0].length) : text;
    const blocks = parseBlocks(body, depth);
    const content =
      blocks.length === 1 && blocks[0].type === "paragraph"
        ? html`<${Text} text=${blocks[0].text} />`
        : blocks.map((block, i) => html`<${Block} key=${i} block=${block} depth=${depth} tight=${true} />`);
    if (!task) return html`<li>${content}</li>`;
    const done = task[1] !== " ";
    return html`<li class="task"><input type="checkbox" checked=${done} disabled aria-label=${done ? "done" : "open"} />${content}</li>`;
  }
}

class Row extends Kept {
  render({ line, columns, align }) {
    const cells = tableCells(line);
    return html`<tr>${Array.from({ length: columns }, (_, i) => html`<td class=${align[i]}><${Text} text=${cells[i] ?? ""} /></td>`)}</tr>`;
  }
}

function Table({ block }) {
  return html`<div class="table" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${block.head.map((cell, i) => html`<th class=${block.align[i]}><${Text} text=${cell} /></th>`)}</tr></thead>
    <tbody>${block.rows.map((line, i) => html`<${Row} key=${i} line=${line} columns=${block.head.length} align=${block.align} />`)}</tbody>
  </table></div>`;
}

class Block extends Component {
  shouldComponentUpdate(next) {
    return next.block !== this.props.block;
  }

  render({ block, depth = 0, tight }) {
    switch (block.type) {
      case "heading":
        return html`<${`h${Math.min(6, block.level + 2)}`}><${Text} text=${block.text} /><//>`;
      case "code":
        return html`<${CodeBlock} text=${block.text} lang=${block.lang} />`;
      case "quote":
        return html`<blockquote>${parseBlocks(block.text, depth + 1).map((inner, i) => html`<${Block} key=${i} block=${inner} depth=${depth + 1} />`)}</blockquote>`;
      case "list": {
        const items = block.items.map((text, i) => html`<${Item} key=${i} text=${text} depth=${depth + 1} />`);
        return block.ordered ? html`<ol start=${block.first}>${items}</ol>` : html`<ul>${items}</ul>`;
      }
      case "table":
        return html`<${Table} block=${block} />`;
      case "rule":
        return html`<hr />`;
      default:
        return tight ? html`<div><${Text} text=${block.text} /></div>` : html`<p><${Text} text=${block.text} /></p>`;
    }
  }
}

export class Markdown extends Component {
  constructor() {
    super();
    this.reader = new BlockReader();
  }

  shouldComponentUpdate(next) {
    return next.text !== this.props.text;
  }

  render({ text }) {
    return html`<div class="markdown">${this.reader.read(text).map((block) => html`<${Block} key=${block.start} block=${block} />`)}</div>`;
  }
}
