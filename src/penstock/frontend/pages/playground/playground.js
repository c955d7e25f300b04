// The playground: holds the conversations, sends requests, and lays the page out.
import { html, render, useEffect, useRef, useState } from "../vendor/preact.js";
import { fetchModels, fetchServer } from "../shared/api.js";
import { Header, KeyDialog, Tool, useStored } from "../shared/shell.js";
import { Boundary } from "./boundary.js";
import { Completion } from "./completion.js";
import { Composer } from "./composer.js";
import { CodeDialog, Shortcuts } from "./dialogs.js";
import { Embeddings } from "./embeddings.js";
import { generate, Live, newVersion } from "./generate.js";
import { parameters, wireMessages } from "./settings.js";
import { SettingsPanel } from "./settings-panel.js";
import { Sidebar } from "./sidebar.js";
import { readJSON } from "./schema.js";
import { forgetAll, fromFile, load, newConversation, newId, save, toJSON } from "./store.js";
import { Answer, Question } from "./thread.js";

const CHAT = "/v1/chat/completions";
const COMPLETION = "/v1/completions";
const IDEAS = ["Explain what a penstock is", "Write a function that reverses a list", "Compare tea and coffee in a table"];
const wide = (pixels) => matchMedia(`(min-width: ${pixels}px)`).matches;

function start() {
  const conversations = load().sort((one, other) => other.changed - one.changed);
  return conversations.length ? conversations : [newConversation("chat", {})];
}

class Playground {
  // Everything that the page does to its state. `show` renders it.
  constructor(show) {
    this.show = show;
    this.conversations = start();
    this.id = this.conversations[0].id;
    this.running = null; // {live, controller, conversation}
    this.notice = "";
    this.said = "";
    this.removed = null;
    this.keyNeeded = false;
    this.server = null;
    this.models = [];
  }

  get conversation() {
    return this.conversations.find((one) => one.id === this.id) ?? this.conversations[0];
  }

  async connect(name = this.server?.model) {
    try {
      this.models = await fetchModels();
      this.server = await fetchServer(name, this.models);
      this.notice = "";
      if (!this.server.chat && !this.conversation.messages.length) this.conversation.mode = "completion";
    } catch (error) {
      if (error.status === 401) this.keyNeeded = true;
      else this.notice = error.message;
    }
    this.show();
  }

  changed() {
    this.conversation.changed = Date.now();
    this.keep();
    this.show();
  }

  keep() {
    const problem = save(this.conversations);
    if (problem) this.notice = problem;
  }

  create = () => {
    const { mode, settings } = this.conversation;
    const empty = this.conversations.find((one) => !one.messages.length && !one.prompt && !one.system);
    if (empty) this.id = empty.id;
    else {
      const made = newConversation(mode, settings);
      this.conversations.unshift(made);
      this.id = made.id;
    }
    this.show();
    document.querySelector("#ask, #prompt")?.focus();
  };

  select = (conversation) => {
    this.id = conversation.id;
    this.show();
  };

  step(by) {
    const at = this.conversations.indexOf(this.conversation) + by;
    if (this.conversations[at]) this.select(this.conversations[at]);
  }

  rename = (conversation, title) => {
    conversation.title = title;
    this.changed();
  };

  remove = (conversation) => {
    if (this.running?.conversation === conversation) this.stop();
    this.removed = conversation;
    this.conversations = this.conversations.filter((one) => one !== conversation);
    if (!this.conversations.length) this.conversations = [newConversation(conversation.mode, {})];
    if (this.id === conversation.id) this.id = this.conversations[0].id;
    clearTimeout(this.forgetting);
    this.forgetting = setTimeout(() => {
      this.removed = null;
      this.show();
    }, 8000);
    this.changed();
  };

  restore = () => {
    this.conversations.unshift(this.removed);
    this.id = this.removed.id;
    this.removed = null;
    this.changed();
  };

  exportAll = () => {
    const address = URL.createObjectURL(new Blob([toJSON(this.conversations, 1)], { type: "application/json" }));
    const link = document.createElement("a");
    link.href = address;
    link.download = "penstock-conversations.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  };

  importFile = (text) => {
    try {
      const found = fromFile(text);
      this.conversations = [...found, ...this.conversations];
      if (found.length) this.id = found[0].id;
      this.notice = "";
    } catch (error) {
      this.notice = `Nothing was imported: ${error.message}.`;
    }
    this.changed();
  };

  setMode = (mode) => {
    this.conversation.mode = mode;
    this.changed();
  };

  // The path and body of the next request.
  request(end) {
    const { conversation } = this;
    const body = { model: this.server?.model, ...parameters(conversation.settings, conversation.mode) };
    if (conversation.mode === "completion") return [COMPLETION, { ...body, prompt: conversation.prompt }];
    return [CHAT, { ...body, messages: wireMessages(conversation, end) }];
  }

  ask = (content) => {
    this.conversation.messages.push({ id: newId(), role: "user", content });
    this.answer();
  };

  // Sends the messages up to the last one, or those before `message`, which gets a further version.
  async answer(message, prefix = "") {
    const { conversation } = this;
    const end = message ? conversation.messages.indexOf(message) : conversation.messages.length;
    await this.run((path, body) => {
      const versions = Array.from({ length: body.n ?? 1 }, () => newVersion(prefix));
      if (prefix) {
        body.messages.push({ role: "assistant", content: prefix });
        Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
      }
      message ??= { id: newId(), role: "assistant", versions: [], current: 0 };
      conversation.messages = [...conversation.messages.slice(0, end), message];
      message.current = message.versions.length;
      message.versions.push(...versions);
      return [versions, message];
    }, end);
  }

  runCompletion = (prefix = "") =>
    this.run((path, body) => {
      const versions = Array.from({ length: body.n ?? 1 }, () => newVersion(prefix));
      body.prompt += prefix;
      this.conversation.outputs = versions;
      return [versions, null];
    });

  async run(prepare, end) {
    this.stop();
    this.notice = "";
    const { conversation } = this;
    let request;
    try {
      request = this.request(end);
    } catch (error) {
      this.notice = error.message;
      return this.show();
    }
    const [path, body] = request;
    const [versions, message] = prepare(path, body);
    const running = { live: new Live(), controller: new AbortController(), conversation };
    this.running = running;
    if (message) message.live = running.live;
    this.said = "Generating";
    this.changed();
    try {
      await generate(path, body, versions, running.live, running.controller.signal);
    } catch (error) {
      if (error.status === 401) this.keyNeeded = true;
    }
    if (message?.live === running.live) message.live = null;
    if (this.running === running) this.running = null;
    if (this.server?.absent) this.connect(); // the request has loaded it
    this.said = versions[0].error ? "The answer failed" : `Answer complete, ${versions[0].stats.output ?? 0} tokens`;
    this.changed();
  }

  stop = () => {
    this.running?.controller.abort();
    this.running = null;
  };

  regenerate(message) {
    const { conversation } = this;
    if (conversation.mode === "completion") return conversation.prompt && this.runCompletion();
    const last = message ?? conversation.messages.findLast((one) => one.role === "assistant");
    return last && this.answer(last);
  }
}

// What messages need of the playground.
function actionsOf(play) {
  const { conversation } = play;
  return {
    regenerate: (message) => play.regenerate(message),
    branch: (message, text) => play.answer(message, text),
    choose: (message, current) => {
      message.current = current;
      play.changed();
    },
    editAnswer: (message, text) => {
      const version = message.versions[message.current];
      message.versions[message.current] = { ...version, text, tokens: [] };
      play.changed();
    },
    editQuestion: (message, text) => {
      const at = conversation.messages.indexOf(message);
      conversation.messages = [...conversation.messages.slice(0, at), { ...message, content: text }];
      play.answer();
    },
    answerCall: (call, content) => {
      conversation.messages.push({ id: newId(), role: "tool", call: call.id, content });
      const { calls } = conversation.messages.findLast((one) => one.role === "assistant").versions.at(-1) ?? { calls: [] };
      const answered = new Set(conversation.messages.filter((one) => one.role === "tool").map((one) => one.call));
      if (calls.every((one) => answered.has(one.id))) play.answer();
      else play.changed();
    },
    run: () => play.runCompletion(),
    stop: play.stop,
    branchOutput: (text) => play.runCompletion(text),
    setPrompt: (text) => {
      conversation.prompt = text;
      play.changed();
    },
    append: (version) => {
      conversation.prompt += version.text;
      conversation.outputs = [];
      play.changed();
    },
  };
}

function Empty({ play }) {
  return html`<div class="empty">
    <h2>What shall ${play.server?.model ?? "the model"} do?</h2>
    <div class="ideas">${IDEAS.map((idea) => html`<button type="button" onClick=${() => play.ask(idea)}>${idea}</button>`)}</div>
  </div>`;
}

function Thread({ play, schema }) {
  const { conversation } = play;
  const busy = play.running?.conversation === conversation;
  const area = useRef();
  const follow = useRef(true);
  const toEnd = () => follow.current && conversation.mode === "chat" && area.current?.scrollTo(0, area.current.scrollHeight);
  useEffect(() => {
    follow.current = true;
    toEnd();
    if (conversation.mode === "completion") area.current.scrollTo(0, 0);
  }, [conversation.id, conversation.messages.length]);
  useEffect(() => {
    const live = play.running?.live;
    if (!busy || !live) return undefined;
    const listener = () => queueMicrotask(() => requestAnimationFrame(toEnd));
    live.listeners.add(listener);
    return () => live.listeners.delete(listener);
  }, [busy, play.running?.live]);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = area.current;
    follow.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  const actions = actionsOf(play);
  const tools = readJSON(conversation.settings.tools || "[]").value;
  const { messages } = conversation;
  return html`<div class="scroll" ref=${area} onScroll=${scrolled} tabindex="0" role="region" aria-label="Conversation">
    <div class="thread">
      ${conversation.mode === "completion"
        ? html`<${Completion} key=${conversation.id} ...${{ conversation, schema, actions }} live=${busy ? play.running.live : null} />`
        : messages.map((message, i) =>
            message.role === "assistant"
              ? html`<${Answer} key=${message.id} ...${{ message, actions, schema }} settings=${conversation.settings} tools=${Array.isArray(tools) ? tools : []} last=${i === messages.length - 1} />`
              : html`<${Question} key=${message.id} ...${{ message, actions, busy }} />`,
          )}
      ${conversation.mode === "chat" && !messages.length && html`<${Empty} play=${play} />`}
    </div>
  </div>`;
}

function useShortcuts(play, actions) {
  useEffect(() => {
    const keydown = (event) => {
      const typing = event.target.matches?.("input, textarea, select");
      if (document.querySelector("dialog[open]")) return;
      const action = event.altKey
        ? { KeyN: play.create, KeyR: () => play.regenerate(), KeyT: () => [...document.querySelectorAll("[data-tokens]")].at(-1)?.click(), KeyS: actions.settings, KeyC: actions.code,
            ArrowUp: () => play.step(-1), ArrowDown: () => play.step(1) }[event.code]
        : { Escape: play.running && play.stop, "?": !typing && actions.help }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", keydown);
    return () => removeEventListener("keydown", keydown);
  });
}

function App() {
  const [, draw] = useState(0);
  const state = useRef();
  state.current ??= new Playground(() => draw((count) => count + 1));
  const play = state.current;
  const [dialog, setDialog] = useState("");
  const [sidebar, setSidebar] = useState(wide(1000));
  const [settings, setSettings] = useStored("penstock.settings", true);
  const [drawer, setDrawer] = useState(false); // settings over the page, where it is narrow
  useEffect(() => void play.connect(), []);
  const toggleSettings = () => (wide(1000) ? setSettings(!settings) : setDrawer(!drawer));
  useShortcuts(play, { settings: toggleSettings, code: () => setDialog("code"), help: () => setDialog("help") });
  const { conversation } = play;
  const busy = play.running?.conversation === conversation;
  const close = () => setDialog("");
  const keyed = () => {
    play.keyNeeded = false;
    play.connect();
  };
  const read = conversation.settings.format === "JSON schema" ? readJSON(conversation.settings.schema || "{}") : {};
  const embeds = Boolean(play.server?.embeddings);
  const shown = !embeds && (wide(1000) ? settings : drawer);
  return html`<div class="app">
    <${Header} model=${play.server?.model} models=${play.models} onModel=${(name) => play.connect(name)} start=${!embeds && html`<${Tool} icon="menu" label="Conversations" aria-expanded=${sidebar} onClick=${() => setSidebar(!sidebar)} />`}>
      ${!embeds && html`<${Tool} class="tool optional" icon="code" label="Copy as code (Alt+C)" onClick=${() => setDialog("code")} />
      <${Tool} class="tool optional" icon="question" label="Keyboard shortcuts (?)" onClick=${() => setDialog("help")} />
      <${Tool} icon="sliders" label="Settings (Alt+S)" aria-pressed=${shown} onClick=${toggleSettings} />`}
    <//>
    <div class="columns">
      ${sidebar && !embeds && html`<${Sidebar} conversations=${play.conversations} current=${conversation.id} removed=${play.removed} actions=${{ ...play, create: play.create }} onClose=${() => setSidebar(false)} />`}
      <main>
        <h1 class="sr">Playground</h1>
        ${!embeds && html`<div class="modes" role="group" aria-label="Mode">
          ${[["chat", "Chat"], ["completion", "Completion"]].map(([mode, label]) => html`<button type="button" aria-pressed=${conversation.mode === mode} onClick=${() => play.setMode(mode)}>${label}</button>`)}
        </div>`}
        ${play.notice && html`<div class="notice problem" role="alert"><span>${play.notice}</span><${Tool} icon="close" label="Close this message" onClick=${() => ((play.notice = ""), play.show())} /></div>`}
        ${embeds
          ? html`<${Embeddings} server=${play.server} />`
          : html`<${Boundary} key=${conversation.id} remedy="Choose another conversation, or delete this one."><${Thread} play=${play} schema=${read.value} /><//>`}
        ${!embeds && conversation.mode === "chat" && html`<${Composer} key="composer" play=${play} busy=${busy} />`}
      </main>
      ${shown && html`<${SettingsPanel} conversation=${conversation} server=${play.server} onClose=${toggleSettings}
        onChange=${(next) => ((conversation.settings = next), play.changed())} onSystem=${(text) => ((conversation.system = text), play.changed())} />`}
    </div>
    <div class="sr" role="status">${play.said}</div>
    ${play.keyNeeded && html`<${KeyDialog} onDone=${keyed} />`}
    ${dialog === "help" && html`<${Shortcuts} onClose=${close} />`}
    ${dialog === "code" && html`<${RequestCode} play=${play} onClose=${close} />`}
  </div>`;
}

function RequestCode({ play, onClose }) {
  try {
    const [path, body] = play.request();
    return html`<${CodeDialog} path=${path} body=${body} onClose=${onClose} />`;
  } catch (error) {
    return html`<${CodeDialog} problem=${error.message} onClose=${onClose} />`;
  }
}

const restart = ["Delete all conversations in this browser", () => (forgetAll(), location.reload())];
render(html`<${Boundary} remedy="Load the page again; if that does not help:" action=${restart}><${App} /><//>`, document.getElementById("app"));
