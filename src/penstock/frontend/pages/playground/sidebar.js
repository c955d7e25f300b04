// The list of conversations.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon, Tool } from "../shared/shell.js";
import { titleOf } from "./store.js";

function Entry({ conversation, current, actions }) {
  const [renaming, setRenaming] = useState(false);
  const field = useRef();
  useEffect(() => {
    if (renaming) field.current.select();
  }, [renaming]);
  const title = titleOf(conversation);
  if (renaming) {
    const done = () => {
      actions.rename(conversation, field.current.value.trim());
      setRenaming(false);
    };
    return html`<li><form onSubmit=${(event) => (event.preventDefault(), done())}>
      <input ref=${field} type="text" aria-label="Title" maxlength="200" value=${title} onBlur=${done}
        onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setRenaming(false))} />
    </form></li>`;
  }
  return html`<li class=${current ? "current" : ""}>
    <button type="button" class="title" aria-current=${current ? "true" : null} onClick=${() => actions.select(conversation)} onDblClick=${() => setRenaming(true)}>${title}</button>
    <span class="actions">
      <${Tool} icon="edit" label="Rename ${title}" onClick=${() => setRenaming(true)} />
      <${Tool} icon="trash" label="Delete ${title}" onClick=${() => actions.remove(conversation)} />
    </span>
  </li>`;
}

export function Sidebar({ conversations, current, removed, actions, onClose }) {
  const file = useRef();
  const read = async () => {
    const [chosen] = file.current.files;
    if (chosen) actions.importFile(await chosen.text());
    file.current.value = "";
  };
  return html`<aside class="sidebar" aria-label="Conversations">
    <header>
      <button type="button" class="btn new" onClick=${actions.create}><${Icon} name="plus" />New conversation</button>
      <${Tool} icon="close" label="Close conversations" class="tool close" onClick=${onClose} />
    </header>
    <ul>${conversations.map((one) => html`<${Entry} key=${one.id} conversation=${one} current=${one.id === current} actions=${actions} />`)}</ul>
    ${removed && html`<div class="removed" role="status"><span>Deleted “${titleOf(removed)}”</span><button type="button" class="link" onClick=${actions.restore}>Undo</button></div>`}
    <footer>
      <button type="button" class="tool" onClick=${actions.exportAll}><${Icon} name="export" />Export</button>
      <button type="button" class="tool" onClick=${() => file.current.click()}><${Icon} name="import" />Import</button>
      <input ref=${file} type="file" accept=".json,application/json" class="sr" tabindex="-1" aria-label="File of conversations" onChange=${read} />
    </footer>
  </aside>`;
}
