// The models of a repository: their state, and what they have done, from the routes of KServe's protocol.
import { html, useRef, useState } from "../vendor/preact.js";
import { fetchJSON } from "../shared/api.js";
import { formatCount, formatSeconds } from "../shared/shell.js";
import { useReads } from "./reads.js";

const PERIOD = 2000; // milliseconds between two reads

// Rollouts and models; both empty if the server has no repository.
export function useRepository(keyed) {
  const [found, setFound] = useState({ rollouts: [], models: [] });
  const before = useRef({});
  useReads(PERIOD, keyed, async () => {
    const { rollouts } = await fetchJSON("/v2/repository/rollouts");
    const index = await fetchJSON("/v2/repository/index", { body: {} });
    const stats = (await fetchJSON("/v2/models/stats")).model_stats;
    const now = { time: performance.now() / 1000, ...Object.fromEntries(stats.map((each) => [`${each.name}/${each.version}`, each])) };
    setFound({ rollouts, models: index.map((row) => figures(row, now, before.current)) });
    before.current = now;
  });
  return found;
}

// A row of the index with the figures of its version: the rate since the last read, the others since it was loaded.
export function figures(row, now, before) {
  const key = `${row.name}/${row.version ?? ""}`;
  const stats = now[key];
  if (!stats?.inference_stats) return row; // a language model has none
  const { count, ns } = stats.inference_stats.success;
  const earlier = before[key]?.inference_stats.success.count ?? count;
  return {
    ...row,
    memory: (stats.memory_usage ?? []).reduce((sum, each) => sum + each.byte_size, 0),
    requests: count,
    rate: Math.max(count - earlier, 0) / (now.time - (before.time ?? 0)),
    latency: count ? ns / count / 1e9 : null,
    batch: stats.execution_count ? stats.inference_count / stats.execution_count : null,
  };
}

const known = (value, format) => (value === undefined || value === null ? "–" : format(value));
const COLUMNS = [
  ["Memory", "of the files that the process holds", (row) => known(row.memory || null, (bytes) => (bytes < 2 ** 20 ? "< 1 MiB" : `${formatCount(bytes / 2 ** 20)} MiB`))],
  ["Requests", "answered since it was loaded", (row) => known(row.requests, formatCount)],
  ["Rate", "answers a second, now", (row) => known(row.rate, (rate) => `${formatCount(rate)}/s`)],
  ["Latency", "mean time from arrival to answer", (row) => known(row.latency, formatSeconds)],
  ["Batch", "mean rows that run together", (row) => known(row.batch, (rows) => rows.toFixed(1))],
];

export function Models({ models, Panel }) {
  return html`<${Panel} title="Models" note="of the repository" wide=${true}><div class="table"><table class="latency models">
    <thead><tr><th scope="col"><span class="sr">Model</span></th><th scope="col">Version</th><th scope="col">State</th>${COLUMNS.map(([name, about]) => html`<th scope="col" title=${about}>${name}</th>`)}</tr></thead>
    <tbody>${models.map((row) => html`<tr key=${`${row.name}/${row.version}`}><th scope="row">${row.name}${row.reason && html`<small>${row.reason}</small>`}</th><td>${row.version ?? "–"}</td><td>${(row.state ?? "not loaded").toLowerCase()}</td>${COLUMNS.map(([, , show]) => html`<td>${show(row)}</td>`)}</tr>`)}</tbody>
  </table></div><//>`;
}
