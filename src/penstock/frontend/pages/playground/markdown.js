// Reads Markdown as a list of blocks. Plain data comes out: what is shown is made of elements, never of HTML text.

// Every pattern takes time in proportion to the line: no two parts of one can match the same characters.
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const FENCE_END = /^ {0,3}(`{3,}|~{3,})\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*(?:\|\s*)?$/;
const MAX_DEPTH = 8; // of lists and quotes in each other; deeper ones are shown as text
const MAX_COLUMNS = 64;

// The blocks of a text that grows. Blocks before the last one are read once and stay the same objects.
export class BlockReader {
  constructor() {
    this.blocks = [];
    this.text = "";
  }

  read(text) {
    if (!text.startsWith(this.text)) this.blocks = [];
    const last = this.blocks.pop();
    if (last && text === this.text) this.blocks.push(last);
    else this.blocks.push(...parseBlocks(text, 0, last ? last.start : 0));
    this.text = text;
    return this.blocks;
  }
}

export function parseBlocks(text, depth = 0, from = 0) {
  const blocks = [];
  const lines = new Lines(text, from);
  while (lines.more()) {
    const start = lines.offset;
    const block = readBlock(lines, depth);
    if (block) blocks.push({ ...block, start });
  }
  return blocks;
}

class Lines {
  constructor(text, from) {
    this.text = text;
    this.offset = from;
    this.load();
  }

  load() {
    const end = this.text.indexOf("\n", this.offset);
    this.end = end < 0 ? this.text.length : end;
    this.line = this.text.slice(this.offset, this.end);
  }

  more() {
    return this.offset < this.text.length;
  }

  take() {
    const line = this.line;
    this.offset = this.end + 1;
    this.load();
    return line;
  }

  peek() {
    const end = this.text.indexOf("\n", this.end + 1);
    return this.end < this.text.length ? this.text.slice(this.end + 1, end < 0 ? this.text.length : end) : "";
  }
}

function readBlock(lines, depth) {
  const { line } = lines;
  if (!line.trim()) return void lines.take();
  const fence = fenceOf(line);
  if (fence) return readFence(lines, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    lines.take();
    return { type: "heading", level: heading[1].length, text: withoutEnd(line.slice(heading[0].length), "#").trim() };
  }
  if (RULE.test(line)) {
    lines.take();
    return { type: "rule" };
  }
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return readQuote(lines);
    if (ITEM.test(line)) return readList(lines);
  }
  if (line.includes("|") && DELIMITERS.test(lines.peek()) && lines.peek().includes("-")) return readTable(lines);
  return readParagraph(lines, depth);
}

// The mark of a line that begins a block of code, and the name of its language.
function fenceOf(line) {
  const found = FENCE.exec(line);
  const rest = found && line.slice(found[0].length).trim();
  return found && !rest.includes("`") ? { mark: found[1], lang: rest.split(/\s/, 1)[0] } : null;
}

// A text without blanks and `marks` at its end.
function withoutEnd(text, marks) {
  let end = text.trimEnd().length;
  while (end && marks.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function readFence(lines, { mark, lang }) {
  lines.take();
  const start = lines.offset;
  while (lines.more()) {
    if (FENCE_END.exec(lines.line)?.[1].startsWith(mark)) {
      const text = lines.text.slice(start, Math.max(start, lines.offset - 1));
      lines.take();
      return { type: "code", lang, text, closed: true };
    }
    lines.take();
  }
  return { type: "code", lang, text: lines.text.slice(start), closed: false };
}

function readQuote(lines) {
  const inner = [];
  while (lines.more() && QUOTE.test(lines.line)) inner.push(lines.take().replace(QUOTE, ""));
  return { type: "quote", text: inner.join("\n") };
}

// The items keep their texts; what is in them is read when they are shown.
function readList(lines) {
  const first = ITEM.exec(lines.line);
  const ordered = first[2].length > 1;
  const items = [];
  let item = null;
  let width = 0;
  while (lines.more()) {
    const { line } = lines;
    const found = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (!line.trim()) {
      if (!lines.more()) break;
      item.push("");
    } else if (item && indent >= width) {
      item.push(line.slice(width));
    } else if (found && !RULE.test(line) && found[2].length > 1 === ordered) {
      width = found[0].length > found[1].length + found[2].length + 4 ? found[1].length + found[2].length + 1 : found[0].length;
      items.push((item = [line.slice(width)]));
    } else if (item.at(-1) === "" || startsBlock(line)) {
      break;
    } else {
      item.push(line.trimStart());
    }
    lines.take();
  }
  return {
    type: "list",
    ordered,
    first: ordered ? parseInt(first[2], 10) : 1,
    items: items.map((entry) => entry.join("\n").trimEnd()),
  };
}

function startsBlock(line) {
  return fenceOf(line) !== null || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

export function tableCells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/, MAX_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines) {
  const head = tableCells(lines.take());
  const align = tableCells(lines.take()).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  while (lines.more() && lines.line.trim() && lines.line.includes("|")) rows.push(lines.take());
  return { type: "table", head, align, rows };
}

function readParagraph(lines, depth) {
  const start = lines.offset;
  let end = start;
  do {
    end = lines.end;
    lines.take();
  } while (lines.more() && lines.line.trim() && (depth >= MAX_DEPTH || !startsBlock(lines.line)));
  return { type: "paragraph", text: lines.text.slice(start, end).trim() };
}

const SPECIAL = /[\\`*_~[!<h]/g;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const MAX_INLINE_DEPTH = 6;
const MAX_LINK = 2000; // characters of a link's text, and of its address

// The parts of a line of text: strings, and {type, children | text, href}.
export function parseInline(text, depth = 0) {
  const parts = [];
  const next = new Map(); // where each mark is next, so that it is not searched for again and again
  const find = (mark, from) => {
    let at = next.get(mark);
    if (at === undefined || (at >= 0 && at < from)) next.set(mark, (at = text.indexOf(mark, from)));
    return at;
  };
  let plain = "";
  let at = 0;
  const push = (part) => {
    if (plain) parts.push(plain);
    plain = "";
    parts.push(part);
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    plain += text.slice(at, found.index);
    at = found.index;
    const part = readPart(text, at, depth, find);
    if (part) {
      push(part);
      at = part.end;
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  plain += text.slice(at);
  if (plain) parts.push(plain);
  return parts;
}

function readPart(text, at, depth, find) {
  switch (text[at]) {
    case "`":
      return readCode(text, at, find);
    case "h":
    case "<":
      return readAddress(text, at);
    case "[":
    case "!":
      return readLink(text, at, depth, find);
    case "\\":
      return null;
    default:
      return readEmphasis(text, at, depth, find);
  }
}

function readCode(text, at, find) {
  let length = 1;
  while (text[at + length] === "`" && length < 8) length += 1;
  const mark = "`".repeat(length);
  const end = find(mark, at + length);
  return end < 0 ? null : { type: "code", text: text.slice(at + length, end).trim(), end: end + length };
}

function readAddress(text, at) {
  const start = text[at] === "<" ? at + 1 : at;
  if (text[at] !== "<" && /\w/.test(text[at - 1] ?? "")) return null;
  ADDRESS.lastIndex = start;
  const found = ADDRESS.exec(text);
  if (!found) return null;
  const address = start > at ? found[0] : withoutEnd(found[0], ".,;:!?)]*_~");
  const href = safeAddress(address);
  const end = start + address.length;
  if (!href || (start > at && text[end] !== ">")) return null;
  return { type: "link", href, children: [address], end: start > at ? end + 1 : end };
}

// A link or an image. Images are shown as links: the page loads nothing from elsewhere.
function readLink(text, at, depth, find) {
  const start = text[at] === "!" ? at + 2 : at + 1;
  if (text[start - 1] !== "[") return null;
  const middle = find("](", start);
  if (middle < 0 || middle - start > MAX_LINK || depth >= MAX_INLINE_DEPTH) return null;
  if (text.slice(start, middle).includes("[")) return null;
  const end = find(")", middle);
  if (end < 0 || end - middle > MAX_LINK) return null;
  const href = safeAddress(text.slice(middle + 2, end).trim().split(/\s/)[0]);
  const label = text.slice(start, middle);
  if (!href) return { type: "refused", text: text.slice(at, end + 1), end: end + 1 };
  return { type: "link", href, children: parseInline(label || href, depth + 1), end: end + 1 };
}

function readEmphasis(text, at, depth, find) {
  const double = text[at + 1] === text[at];
  if (text[at] === "~" && !double) return null;
  const mark = double ? text[at] + text[at] : text[at];
  const start = at + mark.length;
  const word = /[\p{L}\p{N}]/u;
  if (depth >= MAX_INLINE_DEPTH || !text[start] || /\s/.test(text[start])) return null;
  if (text[at] === "_" && word.test(text[at - 1] ?? "")) return null;
  let end = find(mark, start + 1);
  if (end > 0 && !double && text[end + 1] === mark) end = closeAfterStrong(text, mark, end);
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  if (text[at] === "_" && word.test(text[end + mark.length] ?? "")) return null;
  const type = mark === "~~" ? "strike" : double ? "strong" : "em";
  return { type, children: parseInline(text.slice(start, end), depth + 1), end: end + mark.length };
}

// Of *a **b** c*: where the first mark ends.
function closeAfterStrong(text, mark, at) {
  const strong = text.indexOf(mark + mark, at + 2);
  return strong < 0 || strong - at > MAX_LINK ? -1 : text.indexOf(mark, strong + 2);
}

// The address if a click on it is harmless, else "".
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
}
