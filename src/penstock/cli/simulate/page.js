// Draws the report of a simulation: a table of figures, what is said and shown, plots over time, and the timelines.
// The page of --serve begins and stops runs, and draws their reports as they grow.
(() => {
  const main = document.getElementById("main");
  let report, variants;
  const colors = ["#2f7de1", "#e0722f", "#2a9d6f", "#a35bd6", "#c9a227", "#d6456b"];
  const charts = [
    ["Throughput", "requests a second", ["throughput_rps"]],
    ["Latency of requests", "ms; solid: median, dashed: 99%", ["inference_latency_ms_p50", "inference_latency_ms_p99"]],
    ["Time to first token", "ms; solid: median, dashed: 99%", ["ttft_ms_p50", "ttft_ms_p99"]],
    ["Time per output token", "ms; solid: median, dashed: 99%", ["tpot_ms_p50", "tpot_ms_p99"]],
    ["Batch utilisation", "% of the sequences that could run", ["batch_utilization_pct"]],
    ["GPU utilisation", "% of the time in steps", ["gpu_utilization_pct"]],
    ["KV cache", "% of blocks held; dashed: of their slots filled", ["kv_held_pct", "kv_filled_pct"]],
    ["Queue", "requests that wait; dashed: that run", ["waiting", "running"]],
    ["Replicas", "that are ready", ["replicas"]],
    ["Cost so far", "", ["cost"]],
  ];

  // Text is set as text, never as markup.
  function element(name, text, parent) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function section(title, wide) {
    const made = element("section", undefined, main);
    if (wide) made.className = "wide";
    element("h2", title, made);
    return made;
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return value >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString();
  }

  function table(parent, heading, rows) {
    const made = element("table", undefined, parent);
    const top = element("tr", undefined, element("thead", undefined, made));
    heading.forEach((text) => element("th", text, top));
    const body = element("tbody", undefined, made);
    rows.forEach((cells) => {
      const row = element("tr", undefined, body);
      cells.forEach((text) => element("td", text, row));
    });
    return made;
  }

  // All variants on one axis of times: the union of theirs.
  function joined(names) {
    const times = [...new Set(variants.flatMap(([, run]) => run.series.at))].sort((a, b) => a - b);
    const columns = variants.flatMap(([, run]) => {
      const places = new Map(run.series.at.map((at, i) => [at, i]));
      return names.map((name) => times.map((at) => (places.has(at) ? run.series[name][places.get(at)] : undefined)));
    });
    return [times, ...columns];
  }

  function chart([title, note, names]) {
    const parent = section(title);
    const keys = element("ul", undefined, parent);
    keys.className = "keys";
    element("li", note || report.prices.currency, keys);
    const series = [{ label: "second" }];
    variants.forEach(([variant], i) => {
      const stroke = colors[i % colors.length];
      const key = element("li", undefined, keys);
      element("i", undefined, key).style.background = stroke;
      key.append(variant || "value");
      names.forEach((name, j) => series.push({ label: `${variant} ${name}`.trim(), stroke, width: 1.5, dash: j ? [4, 4] : undefined, spanGaps: true, points: { show: false }, value: (plot, value) => number(value) }));
    });
    const place = element("div", undefined, parent);
    const muted = getComputedStyle(keys).color;
    const grid = { stroke: "rgba(128, 140, 155, 0.2)", width: 1 };
    const options = {
      width: place.clientWidth || 400,
      height: 190,
      scales: { x: { time: false }, y: { range: (plot, low, high) => [Math.min(low ?? 0, 0), high > 0 ? high * 1.1 : 1] } },
      axes: [{ stroke: muted, grid: { show: false }, values: (plot, ticks) => ticks.map((tick) => `${tick} s`) }, { stroke: muted, grid, size: 72, values: (plot, ticks) => ticks.map(number) }],
      legend: { show: false },
      series,
    };
    const plot = new uPlot(options, joined(names), place);
    new ResizeObserver(() => place.clientWidth && plot.setSize({ width: place.clientWidth, height: 190 })).observe(parent);
  }

  function draw(next) {
    report = next;
    variants = Object.entries(report.variants);
    main.style.minHeight = `${main.offsetHeight}px`; // so that a reader's place stays
    main.replaceChildren();
    if (report.claims.length) {
      const rows = report.claims.map(({ claim, text, holds }) => [claim.says, text, holds ? "yes" : "no", claim.note]);
      table(section("What is said, and what this run shows", true), ["said", "here", "holds", "note"], rows).className = "texts";
    }
    charts.forEach(chart);
    const names = Object.keys(variants[0][1].figures);
    const rows = names.map((name) => [name, ...variants.map(([, run]) => number(run.figures[name]))]);
    table(section(`Figures, seed ${report.seed}, prices of ${report.prices.date}`, true), ["", ...variants.map(([name]) => name || "value")], rows);
    variants.forEach(([variant, run]) => {
      if (run.timeline.length) table(section(`Timeline ${variant}`, true), ["second", "what happened"], run.timeline.map(([at, what]) => [at.toFixed(1), what])).className = "texts";
    });
    main.style.minHeight = "";
  }

  function field(name, kind, parent) {
    const label = element("label", `${name} `, parent);
    const made = element(kind, undefined, label);
    made.id = name;
    return made;
  }

  // The page of --serve.
  function control(names) {
    const parent = document.getElementById("run");
    const scenario = field("scenario", "select", parent);
    names.forEach((name) => element("option", name, scenario));
    const [seed, duration] = ["seed", "duration"].map((name) => field(name, "input", parent));
    [seed, duration].forEach((input) => Object.assign(input, { type: "number", min: 0, placeholder: "its own" }));
    const begin = element("button", "Run", parent);
    const stop = element("button", "Stop", parent);
    const status = element("span", "", parent);
    status.setAttribute("role", "status");
    let drawn;

    async function post(path, body) {
      const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      const { error } = await answer.json();
      if (error) status.textContent = error;
      else await look();
    }

    async function look() {
      const text = await (await fetch("/report")).text();
      if (text === drawn) return;
      drawn = text;
      const now = JSON.parse(text);
      begin.disabled = now.status === "running";
      stop.disabled = !begin.disabled;
      status.textContent = now.text || now.status;
      if (!now.report) return;
      document.getElementById("title").textContent = now.report.title;
      document.getElementById("about").textContent = now.report.about;
      draw(now.report);
    }

    async function poll() {
      await look().catch(() => (status.textContent = "the simulator does not answer: penstock simulate --serve has ended"));
      setTimeout(poll, 500);
    }

    const value = (input) => (input.value === "" ? null : Number(input.value));
    begin.addEventListener("click", () => post("/run", { scenario: scenario.value, seed: value(seed), duration: value(duration) }));
    stop.addEventListener("click", () => post("/stop", {}));
    poll();
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  if (data.live) {
    main.replaceChildren();
    control(data.live);
  } else draw(data);
})();
