// Colours code line by line. A line's parts are [class, text]; `state` is what goes on in the next line.

const words = (text) => new Set(text.split(" "));
const C_WORDS =
  "auto break case catch class const continue default delete do else enum export extends extern false final finally for func fn go goto if impl implements import in inline interface is let loop match mod move mut namespace new nil null nullptr operator override package private protected pub public ref return self sizeof static struct super switch template this throw throws trait true try type typedef typename union unsafe use using var virtual void volatile where while yield async await defer range map chan select instanceof typeof of from as function undefined";
const C_TYPES = words(
  "int long short char float double bool boolean string String str unsigned signed byte u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 usize isize size_t Vec Option Result Self any number unknown never error object Object Array Map Set Promise",
);
const SLASHES = { line: "//", block: ["/*", "*/"], strings: `"'\``, words: words(C_WORDS), types: C_TYPES };
const PYTHON = {
  line: "#",
  triple: true,
  strings: `"'`,
  words: words(
    "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield self",
  ),
  types: words("int float str bool bytes list dict set tuple object type print len range isinstance Exception ValueError"),
};
const SHELL = {
  line: "#",
  strings: `"'`,
  words: words("if then else elif fi for in do done while case esac function return export local set unset exit echo cd sudo pip npm curl git docker"),
  types: new Set(),
};
const SQL = {
  line: "--",
  block: ["/*", "*/"],
  strings: `'"`,
  fold: true,
  words: words(
    "select from where and or not in is null insert into values update set delete create table drop alter add primary key foreign references join left right inner outer on group by order having limit offset as distinct union all case when then else end with index view begin commit",
  ),
  types: words("int integer text varchar char boolean date timestamp numeric real serial bigint"),
};
const DATA = { line: "#", strings: `"'`, words: words("true false null yes no on off"), types: new Set(), keys: true };
const JSON_LIKE = { strings: `"`, words: words("true false null"), types: new Set(), keys: true };
const CSS = { block: ["/*", "*/"], strings: `"'`, words: words("important media supports keyframes import"), types: new Set(), keys: true };
const MARKUP = { block: ["<!--", "-->"], strings: `"'`, markup: true, words: new Set(), types: new Set() };
const LANGUAGES = {
  python: PYTHON, py: PYTHON, ruby: { ...SHELL, words: PYTHON.words }, rb: SHELL, r: SHELL,
  bash: SHELL, sh: SHELL, shell: SHELL, zsh: SHELL, console: SHELL, dockerfile: SHELL, makefile: SHELL,
  sql: SQL, yaml: DATA, yml: DATA, toml: DATA, ini: DATA, json: JSON_LIKE, jsonc: JSON_LIKE, css: CSS, scss: CSS,
  html: MARKUP, xml: MARKUP, svg: MARKUP, vue: MARKUP,
};
const OTHERS = words("js javascript jsx ts typescript tsx c cpp c++ h hpp cs csharp java kotlin kt go golang rust rs swift scala php dart zig");
const MAX_LINE = 2000; // characters; a longer line is not coloured

export function languageOf(name) {
  const lower = name.toLowerCase();
  return LANGUAGES[lower] ?? (lower === "diff" || lower === "patch" ? "diff" : OTHERS.has(lower) ? SLASHES : null);
}

export function highlightLine(line, language, state) {
  if (!language || line.length > MAX_LINE) return [[["", line]], state];
  if (language === "diff") {
    const kind = { "+": "add", "-": "del", "@": "f" }[line[0]];
    return [[[kind ? `hl-${kind}` : "", line]], ""];
  }
  const parts = [];
  const push = (kind, text) => {
    const last = parts.at(-1);
    if (last && last[0] === kind) last[1] += text;
    else parts.push([kind, text]);
  };
  let at = 0;
  while (at < line.length) {
    if (state) {
      const end = line.indexOf(state, at);
      const stop = end < 0 ? line.length : end + state.length;
      push(state.length === 3 && `"'`.includes(state[0]) ? "hl-s" : "hl-c", line.slice(at, stop));
      if (end >= 0) state = "";
      at = stop;
      continue;
    }
    const [kind, length, opened] = readToken(line, at, language);
    push(kind, line.slice(at, at + length));
    at += length;
    if (opened) state = opened;
  }
  return [parts, state];
}

const WORD = /[\p{L}_$@][\p{L}\p{N}_$-]*/uy;
const NUMBER = /(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)\w*/y;
const STRINGS = { '"': /"(?:[^"\\]|\\.)*"?/y, "'": /'(?:[^'\\]|\\.)*'?/y, "`": /`(?:[^`\\]|\\.)*`?/y };
const TAG = /<\/?[\w:-]+|\/?>/y;
const ATTRIBUTE = /[\w:-]+(?==)/y;

function readToken(line, at, language) {
  const char = line[at];
  if (language.block && line.startsWith(language.block[0], at)) return ["hl-c", language.block[0].length, language.block[1]];
  if (language.line && line.startsWith(language.line, at)) return ["hl-c", line.length - at];
  if (language.triple && (line.startsWith('"""', at) || line.startsWith("'''", at))) return ["hl-s", 3, line.slice(at, at + 3)];
  if (language.markup) {
    const tag = match(TAG, line, at);
    if (tag) return ["hl-t", tag];
    const attribute = match(ATTRIBUTE, line, at);
    if (attribute) return ["hl-f", attribute];
  }
  if (language.strings.includes(char)) {
    const length = match(STRINGS[char], line, at);
    const key = language.keys && /^\s*:/.test(line.slice(at + length, at + length + 8));
    return [key ? "hl-f" : "hl-s", length];
  }
  if (/\d/.test(char)) return ["hl-n", match(NUMBER, line, at)];
  const length = match(WORD, line, at);
  if (!length) return ["", 1];
  const word = line.slice(at, at + length);
  const name = language.fold ? word.toLowerCase() : word;
  if (language.words.has(name)) return ["hl-k", length];
  if (language.types.has(name)) return ["hl-t", length];
  const after = line.slice(at + length, at + length + 8);
  if (after.startsWith("(") || (language.keys && /^\s*[:=]/.test(after))) return ["hl-f", length];
  return ["", length];
}

function match(pattern, line, at) {
  pattern.lastIndex = at;
  return pattern.exec(line)?.[0].length ?? 0;
}
