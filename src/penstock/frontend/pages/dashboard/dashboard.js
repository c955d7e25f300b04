// The dashboard: reads /server_load every second while it can be seen, and shows the last five minutes.
import { Component, html, render, useEffect, useRef, useState } from "../vendor/preact.js";
import { fetchJSON, fetchModels } from "../shared/api.js";
import { formatCount, formatSeconds, Header, Icon, KeyDialog } from "../shared/shell.js";
import { Chart } from "./chart.js";
import { History } from "./history.js";
import { Models, useRepository } from "./repository.js";
import { Rollouts } from "./rollouts.js";
import { Tenants, useTenants } from "./tenants.js";

const PERIOD = 1000; // milliseconds between two reads
const LATE = 5000; // after an error

// Reads the server's state until `stop`. Nothing is read while the page is hidden.
class Reader {
  constructor(onChange) {
    this.history = new History();
    this.model = ""; // the one whose figures are read; "": the default one
    this.problem = "";
    this.keyNeeded = false;
    this.onChange = onChange;
    document.addEventListener("visibilitychange", () => this.read());
    this.read();
  }

  async read() {
    clearTimeout(this.timer);
    if (document.hidden || this.keyNeeded) return;
    try {
      const { model } = this;
      const load = await fetchJSON(model ? `/server_load?model=${encodeURIComponent(model)}` : "/server_load");
      if (model === this.model) this.history.add(load);
      this.problem = "";
      this.unloaded = false;
    } catch (error) {
      this.keyNeeded = error.status === 401;
      this.unloaded = error.status === 404 && !this.model; // no language model
      this.problem = this.unloaded ? "" : error.message;
    }
    this.onChange();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), this.problem || this.unloaded ? LATE : PERIOD);
  }

  choose(model) {
    this.model = model;
    this.history = new History();
    this.read();
  }
}

function Figure({ label, value, unit, note }) {
  return html`<div class="figure"><dt>${label}</dt><dd><b>${value}</b>${unit && html`<span>${unit}</span>`}</dd><dd class="note">${note}</dd></div>`;
}

function Percentiles({ title, about, values }) {
  return html`<tr><th scope="row" title=${about}>${title}</th>
    ${[50, 90, 99].map((rank) => html`<td>${formatSeconds(values.at(rank))}</td>`)}
    <td class="count">${formatCount(values.count)}</td>
  </tr>`;
}

// The KV cache: each cell is the same share of the blocks.
class BlockMap extends Component {
  shouldComponentUpdate({ pool }) {
    return ["total", "held", "cached"].some((name) => pool[name] !== this.props.pool[name]);
  }

  render({ pool, size, name }) {
    const cells = Math.min(240, pool.total);
    const held = Math.ceil((pool.held / pool.total) * cells);
    const cached = Math.min(cells - held, Math.ceil((pool.cached / pool.total) * cells));
    const share = (count) => `${((count / pool.total) * 100).toFixed(count && count < pool.total / 100 ? 1 : 0)}%`;
    const free = pool.total - pool.held - pool.cached;
    const kinds = [["held", "held by sequences", pool.held], ["cached", "cached prefixes", pool.cached], ["free", "free", free]];
    return html`<div class="pool">
      ${name && html`<h3>${name}</h3>`}
      <div class="map" role="img" aria-label=${kinds.map(([, text, count]) => `${share(count)} ${text}`).join(", ")}>
        ${Array.from({ length: cells }, (_, i) => html`<i class=${i < held ? "held" : i < held + cached ? "cached" : "free"}></i>`)}
      </div>
      <ul class="kinds">${kinds.map(([kind, text, count]) => html`<li><i class=${kind}></i><b>${share(count)}</b> ${text}<span>${formatCount(count)} blocks · ${formatCount(count * size)} tokens</span></li>`)}</ul>
    </div>`;
  }
}

function Panel({ title, note, wide, children }) {
  return html`<section class="panel ${wide ? "wide" : ""}"><header><h2>${title}</h2>${note && html`<span>${note}</span>`}</header>${children}</section>`;
}

const COLORS = { a: "--series-a", b: "--series-b", c: "--series-c" };

function Board({ history, usage }) {
  const { now, last } = history;
  const busy = now.running + now.waiting;
  return html`
    <dl class="figures">
      <${Figure} label="Output" value=${formatCount(last.output)} unit="tok/s" note="${formatCount(last.prefill)} prompt tok/s" />
      <${Figure} label="In the batch" value=${formatCount(now.running)} unit="of ${now.max_num_seqs}" note=${busy ? `${formatCount(now.waiting)} waiting` : "idle"} />
      <${Figure} label="Time to first token" value=${formatSeconds(history.ttft.at(50))} unit="median" note="99%: ${formatSeconds(history.ttft.at(99))}" />
      <${Figure} label="Time per output token" value=${formatSeconds(history.tpot.at(50))} unit="median" note="99%: ${formatSeconds(history.tpot.at(99))}" />
      <${Figure} label="KV cache held" value=${(history.held * 100).toFixed(history.held && history.held < 0.1 ? 1 : 0)} unit="%" note="${formatCount(now.counters.preemptions)} preemptions" />
      <${Figure} label="Prefix cache hits" value=${history.hits === null ? "–" : Math.round(history.hits * 100)} unit=${history.hits === null ? "" : "%"} note="of prompt tokens" />
    </dl>
    <div class="panels">
      <${Panel} title="Throughput" note="tokens per second">
        <${Chart} history=${history} label="Tokens per second" series=${[{ name: "Output", key: "output", color: COLORS.a, fill: true }, { name: "Prompt", key: "prefill", color: COLORS.b }]} />
      <//>
      <${Panel} title="Batch and queue" note="sequences">
        <${Chart} history=${history} label="Sequences" whole=${true} series=${[{ name: "Running", key: "running", color: COLORS.a, fill: true, step: true }, { name: "Waiting", key: "waiting", color: COLORS.c, step: true }]} />
      <//>
      <${Panel} title="Tokens in a step" note="mean of each second">
        <${Chart} history=${history} label="Tokens in a step" stacked=${true} series=${[{ name: "Decode", key: "decodeStep", color: COLORS.a }, { name: "Prefill", key: "prefillStep", color: COLORS.b }]} />
      <//>
      <${Panel} title="Time of a step" note="milliseconds, mean of each second">
        <${Chart} history=${history} label="Milliseconds" stacked=${true} series=${[{ name: "Forward", key: "forward", color: COLORS.a }, { name: "Sampling", key: "sample", color: COLORS.b }, { name: "Host", key: "host", color: COLORS.c }]} />
      <//>
      <${Panel} title="Latency" note="requests of the last five minutes">
        <div class="table"><table class="latency">
          <thead><tr><th scope="col"><span class="sr">Latency</span></th><th scope="col">50%</th><th scope="col">90%</th><th scope="col">99%</th><th scope="col" class="count">Count</th></tr></thead>
          <tbody>
            <${Percentiles} title="First token" about="From a request to its first token (TTFT)" values=${history.ttft} />
            <${Percentiles} title="Each further token" about="Mean time per output token after the first (TPOT)" values=${history.tpot} />
            <${Percentiles} title="Queue" about="From a request to its first step" values=${history.queue} />
            <${Percentiles} title="Whole request" about="From a request to its end" values=${history.e2e} />
          </tbody>
        </table></div>
      <//>
      <${Panel} title="KV cache" note="${now.block_size} tokens in a block">
        ${now.blocks.map((pool, i) => pool.total > 0 && html`<${BlockMap} pool=${pool} size=${now.block_size} name=${now.blocks.length > 1 ? `Group ${i + 1}` : ""} />`)}
      <//>
      ${usage?.rows.length > 0 && html`<${Tenants} usage=${usage} Panel=${Panel} />`}
    </div>`;
}

function App() {
  const [, draw] = useState(0);
  const [model, setModel] = useState("");
  const reader = useRef();
  const [models, setModels] = useState([]);
  const connect = () => {
    fetchModels().then((found) => (setModels(found), setModel((before) => before || found[0])), () => undefined);
    fetchJSON("/server_info").then((server) => setModel(server.model), () => undefined);
  };
  const choose = (name) => {
    setModel(name);
    reader.current.choose(name);
  };
  useEffect(() => {
    reader.current = new Reader(() => draw((count) => count + 1));
    connect();
  }, []);
  const keyed = () => {
    reader.current.keyNeeded = false;
    reader.current.read();
    connect();
  };
  const { history, problem, keyNeeded, unloaded } = reader.current ?? {};
  const usage = useTenants(keyNeeded);
  const { rollouts, models: repository } = useRepository(keyNeeded);
  const state = problem ? "unreachable" : unloaded ? "empty" : (history?.now?.state ?? "connecting");
  const words = { ready: "Serving", restarting: "The engine is started again", asleep: "Asleep: a request wakes it", ended: "The engine has ended", unreachable: "No answer", empty: "No language model is loaded", connecting: "Connecting" };
  return html`<${Header} model=${model} models=${models} onModel=${choose} />
    <main>
      <div class="heading"><h1>Dashboard</h1><span class="state ${state}"><i></i><span role="status">${words[state]}</span></span>
        ${history?.now?.restarts > 0 && html`<span class="state">${history.now.restarts} engine restarts</span>`}</div>
      ${problem && !keyNeeded && html`<div class="problem" role="alert"><${Icon} name="warn" /> ${problem}</div>`}
      ${history?.now && html`<${Board} history=${history} usage=${usage} />`}
      ${repository.length > 0 && html`<div class="panels repository"><${Models} models=${repository} Panel=${Panel} /></div>`}
      ${rollouts.length > 0 && html`<div class="panels rollouts"><${Rollouts} rollouts=${rollouts} Panel=${Panel} /></div>`}
    </main>
    ${keyNeeded && html`<${KeyDialog} onDone=${keyed} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
