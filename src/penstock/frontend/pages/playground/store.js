// Conversations, kept in this browser only. What is kept has a limit; nothing is deleted to make room.

const NAME = "penstock.conversations";
export const MAX_BYTES = 4_000_000; // of characters; browsers allow about 5 million
export const MAX_CONVERSATIONS = 500;
const MAX_IMPORT = 16_000_000;
const ROLES = ["system", "user", "assistant", "tool"];

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(mode, settings) {
  return { id: newId(), title: "", mode, system: "", messages: [], prompt: "", outputs: [], settings: { ...settings }, changed: Date.now() };
}

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME));
    return readAll(found).conversations;
  } catch {
    return [];
  }
}

export function forgetAll() {
  localStorage.removeItem(NAME);
}

// Returns what is wrong, or "". Probabilities of tokens are not kept: they take ten times the text.
export function save(conversations) {
  const text = toJSON(conversations.filter((one) => one.messages.length || one.prompt || one.system));
  if (text.length > MAX_BYTES)
    return `This browser keeps at most ${MAX_BYTES / 1e6} MB of conversations. The latest changes are not saved: export or delete some.`;
  try {
    localStorage.setItem(NAME, text);
    return "";
  } catch {
    return "This browser does not let the page save conversations. Export those that you need.";
  }
}

export function toJSON(conversations, indent) {
  const drop = (key, value) => (key === "tokens" || key === "live" ? undefined : value);
  return JSON.stringify({ format: "penstock.conversations", version: 1, conversations }, drop, indent);
}

// The conversations of a file. Throws an Error that says what is wrong with it.
export function fromFile(text) {
  if (text.length > MAX_IMPORT) throw new Error(`the file has ${text.length} characters; the limit is ${MAX_IMPORT}`);
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON; choose one that this page exported");
  }
  const { conversations, known } = readAll(found);
  if (!known) throw new Error("the file holds no conversations of this page; choose one that it exported");
  return conversations.map((one) => ({ ...one, id: newId() }));
}

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);

function readAll(found) {
  const known = found?.format === "penstock.conversations" && Array.isArray(found.conversations);
  return { known, conversations: known ? found.conversations.slice(0, MAX_CONVERSATIONS).map(readConversation).filter(Boolean) : [] };
}

// Everything is checked: a file may come from anyone.
function readConversation(one) {
  if (typeof one !== "object" || one === null) return null;
  return {
    id: text(one.id) || newId(),
    title: text(one.title).slice(0, 200),
    mode: one.mode === "completion" ? "completion" : "chat",
    system: text(one.system),
    messages: list(one.messages).map(readMessage).filter(Boolean),
    prompt: text(one.prompt),
    outputs: list(one.outputs).map(readVersion),
    settings: readSettings(one.settings),
    changed: Number.isFinite(one.changed) ? one.changed : Date.now(),
  };
}

function readSettings(settings) {
  const entries = typeof settings === "object" && settings ? Object.entries(settings) : [];
  return Object.fromEntries(entries.filter(([, value]) => ["string", "number", "boolean"].includes(typeof value)));
}

function readMessage(message) {
  if (!ROLES.includes(message?.role)) return null;
  const read = { id: newId(), role: message.role };
  if (read.role !== "assistant") return { ...read, content: text(message.content), call: text(message.call) };
  const versions = list(message.versions).map(readVersion);
  if (!versions.length) return null; // an answer has at least one
  return { ...read, versions, current: Math.min(Math.max(0, message.current | 0), versions.length - 1) };
}

function readVersion(version) {
  const stats = {};
  for (const [name, value] of Object.entries(version?.stats ?? {})) if (Number.isFinite(value)) stats[name] = value;
  return {
    text: text(version?.text),
    reasoning: text(version?.reasoning),
    calls: list(version?.calls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
    finish: text(version?.finish),
    error: text(version?.error),
    stats,
  };
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content || conversation.prompt;
  return conversation.title || first.trim().split("\n")[0].slice(0, 60) || "New conversation";
}
