// The panel of settings. A field that is empty shows the server's default and is not sent.
import { html, useState } from "../vendor/preact.js";
import { fetchJSON } from "../shared/api.js";
import { Icon, Tool } from "../shared/shell.js";
import { EXAMPLES, GROUPS, parameters, problemOf, settingsOf } from "./settings.js";

export function SettingsPanel({ conversation, server, onChange, onSystem, onClose }) {
  const { settings, mode } = conversation;
  const change = (name, value) => {
    const next = { ...settings };
    if (value === "" || value === undefined || value === false) delete next[name];
    else next[name] = value;
    onChange(next);
  };
  const changed = settingsOf(mode).filter((setting) => settings[setting.name] !== undefined).length;
  return html`<aside class="settings" aria-label="Settings">
    <header>
      <h2>Settings</h2>
      ${changed > 0 && html`<button type="button" class="tool" onClick=${() => onChange({})}>Reset ${changed}</button>`}
      <${Tool} icon="close" label="Close settings" class="tool close" onClick=${onClose} />
    </header>
    <div class="groups">
      ${mode === "chat" &&
      html`<div class="group fields">
        <label for="system">System prompt</label>
        <textarea id="system" rows="3" placeholder="How the model should behave" value=${conversation.system}
          onInput=${(event) => onSystem(event.target.value)}></textarea>
      </div>`}
      ${GROUPS.filter((group) => !group.in || group.in === mode).map(
        (group) => html`<${Group} key=${group.title} ...${{ group, mode, settings, server, change }} />`,
      )}
    </div>
  </aside>`;
}

function Group({ group, mode, settings, server, change }) {
  const shown = group.settings.filter(
    (setting) => (!setting.in || setting.in === mode) && (!setting.when || settings[setting.when[0]] === setting.when[1]),
  );
  const count = shown.filter((setting) => settings[setting.name] !== undefined).length;
  const check = ["Tools", "Structured output"].includes(group.title) && count > 0;
  return html`<details class="group" open=${group.open || count > 0}>
    <summary><span>${group.title}</span>${count > 0 && html`<span class="count" title="Settings that you changed">${count}</span>`}<${Icon} name="right" /></summary>
    <div class="fields">
      ${shown.map((setting) => html`<${Field} key=${setting.name} ...${{ setting, server, mode }} value=${settings[setting.name]} onChange=${(value) => change(setting.name, value)} />`)}
      ${check && html`<${ServerCheck} ...${{ settings, mode, server }} />`}
    </div>
  </details>`;
}

function fallbackOf(setting, server, mode) {
  if (setting.name === "max_tokens" && mode === "completion") return 16;
  return setting.fallback ?? server?.defaults[setting.name];
}

function Field({ setting, server, mode, value, onChange }) {
  const id = `set-${setting.name}`;
  const problem = problemOf(setting, value);
  const input = (event) => onChange(event.target.value);
  const fallback = fallbackOf(setting, server, mode);
  const about = { "aria-describedby": setting.hint ? `${id}-hint` : null, "aria-invalid": problem ? "true" : null };
  if (setting.kind === "check")
    return html`<label class="check"><input type="checkbox" checked=${Boolean(value)} onChange=${(event) => onChange(event.target.checked)} />
      <span>${setting.label}</span>${setting.hint && html`<small>${setting.hint}</small>`}</label>`;
  const label = html`<label for=${id}>${setting.label}</label>`;
  const hint = html`${setting.hint && html`<small id="${id}-hint">${setting.hint}</small>`}${problem && html`<small class="wrong">${problem}</small>`}`;
  if (setting.kind === "number")
    return html`<div class="field number" title=${setting.hint}>
      <div class="line">${label}<input id=${id} type="number" inputmode="decimal" ...${about} min=${setting.least} max=${setting.most} step=${setting.step ?? "any"}
        placeholder=${fallback} value=${value ?? ""} onInput=${input} /></div>
      ${setting.most !== undefined &&
      html`<input type="range" aria-label="${setting.label} slider" min=${setting.least} max=${setting.most} step=${setting.step}
        class=${value === undefined ? "unset" : ""} value=${value ?? fallback ?? setting.least} onInput=${input} />`}
      ${setting.hint && html`<span class="sr" id="${id}-hint">${setting.hint}</span>`}
      ${problem && html`<small class="wrong">${problem}</small>`}
    </div>`;
  if (setting.kind === "choice")
    return html`<div class="field"><div class="line">${label}<select id=${id} value=${value ?? setting.choices[0]}
      onChange=${(event) => onChange(event.target.value === setting.choices[0] ? "" : event.target.value)}>
      ${setting.choices.map((choice) => html`<option value=${choice}>${choice || "default"}</option>`)}
    </select></div>${hint}</div>`;
  const rows = setting.rows ?? (setting.kind === "lines" ? 2 : 0);
  return html`<div class="field">
    <div class="line">${label}${setting.example && !value && html`<button type="button" class="link" onClick=${() => onChange(EXAMPLES[setting.example])}>Use an example</button>`}
    ${setting.kind === "json" && value && !problem && html`<span class="checked"><${Icon} name="check" />JSON</span>`}</div>
    ${rows
      ? html`<textarea id=${id} rows=${rows} class="mono" spellcheck=${false} ...${about} placeholder=${setting.placeholder} value=${value ?? ""} onInput=${input}></textarea>`
      : html`<input id=${id} type="text" class=${setting.mono || setting.kind === "ids" ? "mono" : ""} ...${about} value=${value ?? ""} onInput=${input} />`}
    ${hint}
  </div>`;
}

// Asks the server whether it accepts tools and format, with a request for one token.
function ServerCheck({ settings, mode }) {
  const [state, set] = useState(null);
  const check = async () => {
    set({ busy: true });
    try {
      const { tools, tool_choice, response_format, structured_outputs } = parameters(settings, mode);
      const given = { tools, tool_choice, response_format, structured_outputs };
      const body = mode === "chat" ? { messages: [{ role: "user", content: "." }] } : { prompt: "." };
      await fetchJSON(mode === "chat" ? "/v1/chat/completions" : "/v1/completions", { body: { ...body, ...given, max_tokens: 1 } });
      set({ good: true });
    } catch (error) {
      set({ problem: error.message });
    }
  };
  return html`<div class="server-check">
    <button type="button" class="btn small" disabled=${state?.busy} onClick=${check}>Check with the server</button>
    <div role="status">
      ${state?.good && html`<span class="checked"><${Icon} name="check" />The server accepts it</span>`}
      ${state?.problem && html`<div class="problem">${state.problem}</div>`}
    </div>
  </div>`;
}
