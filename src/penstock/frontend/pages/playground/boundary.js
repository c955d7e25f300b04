// Shows an error in the place of what could not be shown. What is around it stays usable.
import { Component, html } from "../vendor/preact.js";

// `remedy` says what the reader can do; `action` is [label, function] for a button that does it.
export class Boundary extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  componentDidCatch(error) {
    this.setState({ error });
  }

  render({ children, remedy, action }) {
    const { error } = this.state;
    if (!error) return children;
    return html`<div class="notice problem" role="alert">
      <span>This cannot be shown (${String(error.message ?? error).slice(0, 200)}). ${remedy}</span>
      ${action && html`<button type="button" onClick=${action[1]}>${action[0]}</button>`}
    </div>`;
  }
}
