// Prints, as JSON, the milliseconds of processor time that each hostile text takes, and what some usual ones become.
// node markdown_times.mjs FOLDER, where FOLDER holds markdown.js and store.js.
import { pathToFileURL } from "node:url";

const from = (file) => import(pathToFileURL(`${process.argv[2]}/${file}`));
const { parseBlocks, parseInline, tableCells } = await from("markdown.js");
const { fromFile } = await from("store.js");

const many = (text, size = 100_000) => text.repeat(Math.ceil(size / text.length));
const HOSTILE = {
  "spaces in a heading": `# a${many(" ")}b`,
  "marks in a heading": `# a${many("#")}b`,
  "marks and spaces in a heading": `# a${many(" #")}b`,
  "a fence of tildes": `${many("~")}\``,
  "a fence of backticks": `${many("`")}x\``,
  "spaces after a fence": `\`\`\`${many(" ")}x\``,
  "words after a fence": `~~~${many("x ")}\``,
  "a fence with a long mark": `${many("~")}\n${many("~")}x\n`,
  "fences that do not end": many("~~~\n"),
  "a rule": `${many("- ")}x`,
  "spaces in a rule": `---${many(" ")}x`,
  "an item": `-${many(" ")}x`,
  "spaces below a table": `a|b\n-${many(" ")}x`,
  "delimiters below a table": `a|b\n${many("| - ")}x`,
  "bars below a table": `a|b\n|-${many("|")}x`,
  "bars in a row": `a|b\n-|-\n${many("|")}`,
  "escaped bars": `a|b\n-|-\n${many("\\|")}`,
  "ends of addresses": many(`http://a${many(".", 1900)}b `),
  brackets: many("["),
  "links without an end": many("[a]("),
  "links with an end": `${many("[a](")})`,
  stars: many("*"),
  "stars and words": many("*a **b "),
  underscores: many("_a __b_ "),
  "backticks and words": many("` `` "),
  "quotes in quotes": many("> ", 2000) + many("a"),
  "items in items": many("- ", 2000) + many("a"),
  "lists and lines": many("- a\nb\n"),
  less: many("<http://"),
  "exclamation marks": many("!["),
};

function readAll(text, depth = 0) {
  for (const block of parseBlocks(text, depth)) {
    if (["quote", "list"].includes(block.type) && depth < 8) for (const inner of block.items ?? [block.text]) readAll(inner, depth + 1);
    else if (block.type === "table") for (const row of block.rows) tableCells(row).forEach((cell) => parseInline(cell));
    else if (block.type !== "code") parseInline(block.text ?? "");
  }
}

const times = {};
for (const [name, text] of Object.entries(HOSTILE)) {
  const began = process.cpuUsage();
  readAll(text);
  times[name] = Math.round(process.cpuUsage(began).user / 1000);
}

const USUAL = ["# A title #", "##  Two  ##  ", "```py\na\n```\nb", "~~~~\na\n~~~\n~~~~\nb", "``` a`b", "---", "a|b\n:-|-:\n1|2\n", "a|b\n-- x"];
const blocks = USUAL.map((text) => parseBlocks(text).map(({ start, ...block }) => block));

const conversation = (...messages) => JSON.stringify({ format: "penstock.conversations", version: 1, conversations: [{ messages }] });
const answers = [[], undefined, {}, [{}], [{ text: "hello" }]];
const imported = answers.map((versions) => fromFile(conversation({ role: "user", content: "hi" }, { role: "assistant", versions }))[0].messages.length);
console.log(JSON.stringify({ times, blocks, imported }));
