// A chart over time, of up to five minutes unless `span` has other seconds, drawn by uPlot.
import { Component, html } from "../vendor/preact.js";
import { WINDOW } from "./history.js";

const HEIGHT = 178;
const SHORTEST = 60; // seconds that are shown at least

// light-dark() as the browser computes it, which a canvas cannot read from a variable.
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function withAlpha(value, alpha) {
  return value.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

export class Chart extends Component {
  componentDidMount() {
    this.resize = new ResizeObserver(() => this.base.offsetWidth && this.plot.setSize({ width: this.base.offsetWidth, height: HEIGHT }));
    this.redraw = () => {
      this.plot.destroy();
      this.draw();
    };
    this.draw();
    this.resize.observe(this.base);
    addEventListener("themechange", this.redraw);
    this.media = matchMedia("(prefers-color-scheme: dark)");
    this.media.addEventListener("change", this.redraw);
  }

  componentWillUnmount() {
    this.resize.disconnect();
    removeEventListener("themechange", this.redraw);
    this.media.removeEventListener("change", this.redraw);
    this.plot.destroy();
  }

  componentDidUpdate() {
    this.plot.setData(this.data(), false);
    this.plot.setScale("x", this.range());
  }

  range() {
    const { time } = this.props.history.columns;
    const max = time.at(-1);
    return { min: max - Math.min(this.props.span ?? WINDOW, Math.max(SHORTEST, max - time[0])), max };
  }

  // Stacked series are drawn from the last one to the first: each is the sum of itself and those before it.
  data() {
    const { history, series, stacked } = this.props;
    const { columns } = history;
    const sums = [];
    series.forEach(({ key }, i) => {
      sums.push(stacked && i ? columns[key].map((value, at) => (value === null ? null : value + sums[i - 1][at])) : columns[key]);
    });
    return [columns.time, ...(stacked ? sums.reverse() : sums)];
  }

  draw() {
    const { series, stacked, whole } = this.props;
    const muted = resolved("--muted");
    const grid = { stroke: resolved("--line"), width: 1 };
    const font = "11.5px Inter, system-ui, sans-serif";
    const ordered = stacked ? [...series].reverse() : series;
    const { stepped } = uPlot.paths;
    const options = {
      width: this.base.offsetWidth || 400,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { y: false, points: { size: 7 }, sync: { key: "dashboard" } },
      scales: { x: { time: true, range: (plot, min, max) => [min, max] }, y: { range: (plot, min, max) => [0, Math.max(max > 0 ? max * 1.15 : 1, whole ? 4 : 0)] } },
      axes: [
        { stroke: muted, font, grid: { show: false }, ticks: { show: false }, size: 24, space: 80, values: this.props.span ? "{HH}:{mm}" : "{HH}:{mm}:{ss}" },
        { stroke: muted, font, grid, ticks: { show: false }, size: 40, space: 36, values: (plot, ticks) => ticks.map((tick) => this.short(tick)) },
      ],
      series: [
        {},
        ...ordered.map(({ color: name, fill, step }) => {
          const stroke = resolved(name);
          const area = stacked ? withAlpha(stroke, 0.85) : fill ? withAlpha(stroke, 0.13) : undefined;
          return { stroke, fill: area, width: stacked ? 0 : 1.75, points: { show: false }, ...(step && { paths: stepped({ align: 1 }) }) };
        }),
      ],
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, this.data(), this.base.querySelector(".plot"));
    this.plot.setScale("x", this.range());
  }

  point(index) {
    if (index !== this.state.index) this.setState({ index });
  }

  short(value) {
    if (this.props.whole && !Number.isInteger(value)) return "";
    if (value >= 10000) return `${Math.round(value / 1000)}k`;
    return Number(value.toPrecision(value < 1 ? 2 : 3)).toString();
  }

  render({ history, series, label }, { index }) {
    const { columns } = history;
    const at = index ?? columns.time.length - 1;
    return html`<div class="chart">
      <ul class="keys" aria-label=${label}>${series.map(({ name, key, color: variable }) => html`<li><i style=${{ background: `var(${variable})` }}></i>${name}<b>${columns[key][at] == null ? "–" : this.short(columns[key][at])}</b></li>`)}</ul>
      <div class="plot" aria-hidden="true"></div>
    </div>`;
  }
}
