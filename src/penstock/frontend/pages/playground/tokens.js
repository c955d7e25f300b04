// The view of tokens: coloured by probability, with the alternatives of each, from which the answer can branch.
import { Component, html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "../shared/shell.js";
import { textOf } from "./generate.js";

const GROUP = 64; // tokens that render together
const STEPS = [0.9, 0.7, 0.5, 0.3, 0.1, 0]; // lowest probability of each colour

const shadeOf = (probability) => STEPS.findIndex((least) => probability >= least);
const probabilityOf = (logprob) => (logprob == null ? 1 : Math.exp(logprob));

export function percent(probability) {
  if (probability >= 0.9995) return "100%";
  return probability < 0.001 ? "<0.1%" : `${(probability * 100).toFixed(probability < 0.1 ? 1 : 0)}%`;
}

// Spaces and line breaks as visible signs.
export const visible = (text) => (text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥"));

class Group extends Component {
  shouldComponentUpdate(next) {
    return next.length !== this.props.length || next.focused !== this.props.focused || next.tokens !== this.props.tokens;
  }

  render({ tokens, start, length, focused }) {
    return tokens.slice(start, start + length).map((token, i) => {
      const at = start + i;
      const probability = probabilityOf(token.logprob);
      const breaks = token.text.includes("\n") ? "\n".repeat(Math.min(2, token.text.split("\n").length - 1)) : "";
      const shown = breaks ? token.text.replaceAll("\n", "↵") : token.text;
      return [
        html`<span class="token p${shadeOf(probability)}" role="button" tabindex=${at === focused ? 0 : -1} data-token=${at}
          aria-label="${visible(token.text)}, ${percent(probability)}">${shown || "∅"}</span>`,
        breaks,
      ];
    });
  }
}

export function TokenView({ version, onBranch }) {
  const { tokens } = version;
  const [focused, setFocused] = useState(0);
  const [open, setOpen] = useState(null); // {at, pinned}
  const area = useRef();
  const leave = useRef();
  useEffect(() => () => clearTimeout(leave.current), []);

  const tokenAt = (event) => {
    const at = event.target.closest?.("[data-token]")?.dataset.token;
    return at === undefined ? null : Number(at);
  };
  const show = (at, pinned) => {
    clearTimeout(leave.current);
    setOpen({ at, pinned });
  };
  const move = (at) => {
    const next = Math.max(0, Math.min(tokens.length - 1, at));
    setFocused(next);
    if (open) show(next, true);
    area.current.querySelector(`[data-token="${next}"]`)?.focus();
  };
  const keys = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
  const keydown = (event) => {
    const at = tokenAt(event);
    if (event.key === "Escape" && open) {
      setOpen(null);
      area.current.querySelector(`[data-token="${focused}"]`)?.focus();
      event.stopPropagation();
    } else if (at === null) return;
    else if (event.key in keys) move(at + keys[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(tokens.length - 1);
    else if (event.key === "Enter" || event.key === " ") show(at, true);
    else return;
    event.preventDefault();
  };
  const hover = (event) => {
    const at = tokenAt(event);
    if (at !== null && !open?.pinned) show(at, false);
    else if (open && !open.pinned && event.target.closest(".card")) clearTimeout(leave.current);
  };
  const out = () => {
    if (open && !open.pinned) leave.current = setTimeout(() => setOpen(null), 250);
  };
  const click = (event) => {
    const at = tokenAt(event);
    if (at === null) return;
    setFocused(at);
    if (open?.pinned && open.at === at) setOpen(null);
    else show(at, true);
  };
  const groups = [];
  for (let start = 0; start < tokens.length; start += GROUP) {
    const length = Math.min(GROUP, tokens.length - start);
    const inside = focused >= start && focused < start + length ? focused : -1;
    groups.push(html`<${Group} key=${start} ...${{ tokens, start, length, focused: inside }} />`);
  }
  return html`<div class="tokens" ref=${area} onKeyDown=${keydown} onMouseOver=${hover} onMouseLeave=${out} onClick=${click}>
    <div class="legend" aria-hidden="true">less likely ${[5, 4, 3, 2, 1, 0].map((shade) => html`<i class="p${shade}"></i>`)} more likely</div>
    <div class="text" role="group" aria-label="Tokens; arrow keys move, Enter shows alternatives">${groups}</div>
    ${open && tokens[open.at] && html`<${Card} key=${open.at} area=${area} tokens=${tokens} at=${open.at} onBranch=${onBranch} />`}
  </div>`;
}

// The alternatives of one token, below it.
function Card({ area, tokens, at, onBranch }) {
  const card = useRef();
  const [place, setPlace] = useState(null);
  useEffect(() => {
    const token = area.current.querySelector(`[data-token="${at}"]`);
    if (!token) return;
    const inside = area.current.getBoundingClientRect();
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const width = card.current.offsetWidth;
    const left = Math.max(0, Math.min(box.left - inside.left - 8, inside.width - width));
    const below = box.bottom - inside.top + 6;
    const above = box.top - inside.top - card.current.offsetHeight - 6;
    setPlace({ left, top: box.bottom + card.current.offsetHeight + 90 > innerHeight && above > -200 ? above : below });
  }, [at]);
  const token = tokens[at];
  const rows = token.top.some((one) => one.text === token.text) ? token.top : [...token.top, token];
  const ranked = [...rows].sort((one, other) => other.logprob - one.logprob);
  return html`<div class="card" ref=${card} role="dialog" aria-label="Alternatives" style=${place ? { left: `${place.left}px`, top: `${place.top}px` } : { visibility: "hidden" }}>
    <div class="head"><code>${visible(token.text)}</code><b>${percent(probabilityOf(token.logprob))}</b><span>token ${at + 1} of ${tokens.length}</span></div>
    ${ranked.map((one) => {
      const probability = probabilityOf(one.logprob);
      const before = textOf([...tokens.slice(0, at), one]);
      const taken = one.text === token.text;
      return html`<button type="button" disabled=${taken || before === null || !onBranch} onClick=${() => onBranch(before)}
        title=${taken ? "The token that was taken" : "Branch: answer again from this token"}>
        <span class="bar"><i style=${{ width: `${probability * 100}%` }}></i></span>
        <code>${visible(one.text)}</code><span class="value">${percent(probability)}</span>
        <${Icon} name=${taken ? "check" : "right"} />
      </button>`;
    })}
    ${token.top.length > 0 && onBranch && html`<p>Choose an alternative to answer again from there.</p>`}
  </div>`;
}
