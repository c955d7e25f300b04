// The header, icons, dialogs and small hooks that all pages use.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { readKey, saveKey } from "./api.js";

const ICONS = {
  bolt: "M13 2 4 14h7l-1 8 9-12h-7z",
  check: "M5 12.5 10 17.5 19 7",
  close: "M6 6l12 12M18 6 6 18",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  copy: "M9 9h10v11H9zM6 15H5V4h10v1",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  export: "M12 4v11M7 10l5 5 5-5M5 20h14",
  import: "M12 15V4M7 9l5-5 5 5M5 20h14",
  key: "M14 10a4 4 0 1 1-4-4 4 4 0 0 1 4 4zm-1 3 8 8m-4-4 2-2",
  left: "M14 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  plus: "M12 5v14M5 12h14",
  question: "M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 17.5v.01",
  redo: "M20 12a8 8 0 1 1-2.6-5.9M20 4v4.5h-4.5",
  right: "M10 6l6 6-6 6",
  send: "M12 19V5M6 11l6-6 6 6",
  sliders: "M4 7h9m5 0h2M4 17h2m5 0h9M15.5 4.5v5M8.5 14.5v5",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.500M12 19.500V22M2 12h2.500M19.5 12H22M5 5l1.7 1.700M17.3 17.3 19 19M19 5l-1.7 1.700M6.7 17.3 5 19",
  tokens: "M4 6h6v5H4zM13 6h7v5h-7zM4 14h8v5H4zM15 14h5v5h-5z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  warn: "M12 4 2.5 20h19zM12 10v4.500M12 17.300v.01",
  wrench: "M20 7.500a4.5 4.5 0 0 1-6.2 4.200L7.5 18a2.1 2.1 0 0 1-3-3l6.3-6.300A4.5 4.5 0 0 1 16.5 4L14 6.5 15 9l2.5 1z",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

// A button that shows an icon; `label` is its name for screen readers and its tooltip.
export function Tool({ icon, label, text, ...rest }) {
  return html`<button type="button" class="tool" title=${label} aria-label=${label} ...${rest}>
    <${Icon} name=${icon} />${text}
  </button>`;
}

// A value kept in the browser's storage. Storage may be full or off: the value then lasts as long as the page.
export function useStored(name, first) {
  const [value, set] = useState(() => {
    try {
      return JSON.parse(localStorage.getItem(name)) ?? first;
    } catch {
      return first;
    }
  });
  const change = (next) => {
    set(next);
    try {
      localStorage.setItem(name, JSON.stringify(next));
    } catch {
      // kept for this page only
    }
  };
  return [value, change];
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

try {
  applyTheme(JSON.parse(localStorage.getItem("penstock.theme")));
} catch {
  // the system's theme
}

function ThemeButton() {
  const [, set] = useStored("penstock.theme", null);
  const dark = isDark();
  const flip = () => {
    const theme = dark ? "light" : "dark";
    applyTheme(theme);
    set(theme);
  };
  return html`<${Tool} icon=${dark ? "sun" : "moon"} label=${dark ? "Light theme" : "Dark theme"} onClick=${flip} />`;
}

const PAGES = [
  ["/", "Playground"],
  ["/dashboard", "Dashboard"],
  ["/docs", "API"],
];

// With several `models`, one is chosen, which `onModel` gets.
export function Header({ model, models = [], onModel, children, start }) {
  return html`<header class="top">
    ${start}
    <a class="brand" href="/" aria-label="Penstock playground">
      <svg viewBox="0 0 24 24" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="2.6" stroke-linecap="round">
        <path d="M3 5h5c8 0 5 14 13 14" /><path d="M3 11h2.500c5 0 3.5 8 9 8" opacity=".45" />
      </svg>
      <span>Penstock</span>
    </a>
    <nav aria-label="Pages">
      ${PAGES.map(([path, name]) => html`<a href=${path} aria-current=${path === location.pathname ? "page" : null}>${name}</a>`)}
    </nav>
    <div class="space"></div>
    ${models.length > 1
      ? html`<select class="model" aria-label="Model" value=${model} onChange=${(event) => onModel(event.target.value)}>${models.map((name) => html`<option value=${name} selected=${name === model}>${name}</option>`)}</select>`
      : model && html`<div class="model" title="The model that is served">${model}</div>`}
    ${children}<${ThemeButton} />
  </header>`;
}

// A modal dialog; the browser keeps the focus inside, and Escape closes it.
export function Dialog({ title, onClose, children }) {
  const element = useRef();
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    element.current.querySelector("section input, section textarea")?.focus(); // the browser takes the first button: Close
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onClose=${onClose}>
    <header><h2 id="dialog-title">${title}</h2><${Tool} icon="close" label="Close" onClick=${() => element.current.close()} /></header>
    <section>${children}</section>
  </dialog>`;
}

// Asks for the API key. It stays in this tab's session storage.
export function KeyDialog({ onDone }) {
  const [key, setKey] = useState(readKey());
  const save = (event) => {
    event.preventDefault();
    saveKey(key.trim());
    onDone();
  };
  return html`<${Dialog} title="This server needs an API key" onClose=${onDone}>
    <form onSubmit=${save}>
      <p>The key stays in this tab until you close it, and is sent to this server only.</p>
      <label class="sr" for="api-key">API key</label>
      <input id="api-key" type="password" autocomplete="off" class="mono" placeholder="API key" value=${key}
        onInput=${(event) => setKey(event.target.value)} />
      <div class="row end"><button class="btn primary" disabled=${!key.trim()}>Use this key</button></div>
    </form>
  <//>`;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // a page that is not on localhost or https has no clipboard
  }
}

// A button that copies, and says that it did.
export function CopyButton({ text, label = "Copy" }) {
  const [state, set] = useState("");
  const copy = async () => {
    set((await copyText(typeof text === "function" ? text() : text)) ? "Copied" : "No clipboard");
    setTimeout(() => set(""), 1500);
  };
  return html`<button type="button" class="tool" title=${label} aria-label=${state || label} onClick=${copy}>
    <${Icon} name=${state === "Copied" ? "check" : "copy"} />
  </button>`;
}

export function formatCount(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function formatSeconds(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}
