// The field in which one writes, and its button.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "../shared/shell.js";

export function Composer({ play, busy }) {
  const [text, setText] = useState("");
  const field = useRef();
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(240, field.current.scrollHeight)}px`;
  }, [text]);
  const send = () => {
    if (!text.trim() || busy) return;
    play.ask(text.trim());
    setText("");
  };
  const keydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
    <label class="sr" for="ask">Message</label>
    <textarea id="ask" ref=${field} rows="1" placeholder="Ask anything" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keydown}></textarea>
    ${busy
      ? html`<button type="button" class="btn round" aria-label="Stop (Escape)" title="Stop (Escape)" onClick=${play.stop}><${Icon} name="stop" /></button>`
      : html`<button class="btn primary round" aria-label="Send (Enter)" title="Send (Enter)" disabled=${!text.trim()}><${Icon} name="send" /></button>`}
  </form>`;
}
