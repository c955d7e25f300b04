// What tenants have used of the engine in the last 24 hours, from /tenant_usage.
import { html, useState } from "../vendor/preact.js";
import { fetchJSON } from "../shared/api.js";
import { formatCount } from "../shared/shell.js";
import { Chart } from "./chart.js";
import { useReads } from "./reads.js";

const PERIOD = 60_000; // milliseconds between two reads
const HOUR = 3600;
const COLORS = ["--series-a", "--series-b", "--series-c", "--series-d"]; // the last one is of all other tenants

// Sums of each tenant, the largest first, and seconds of the engine in each hour.
function summed({ since, rows }) {
  const tenants = new Map();
  const hours = Array.from({ length: 24 }, (_, i) => since + i * HOUR);
  for (const row of rows) {
    const sum = tenants.get(row.tenant) ?? { name: row.tenant, requests: 0, prompt: 0, output: 0, step_ms: 0, nano: 0, hours: hours.map(() => 0) };
    for (const key of ["requests", "prompt", "output", "step_ms", "nano"]) sum[key] += row[key];
    const at = Math.round((Date.parse(`${row.hour.replace(" ", "T")}Z`) / 1000 - since) / HOUR);
    if (at in hours) sum.hours[at] += row.step_ms / 1000;
    tenants.set(row.tenant, sum);
  }
  return { hours, tenants: [...tenants.values()].sort((a, b) => b.step_ms - a.step_ms) };
}

export function useTenants(keyed) {
  const [usage, setUsage] = useState();
  useReads(PERIOD, keyed, async () => setUsage(await fetchJSON("/tenant_usage")));
  return usage;
}

export function Tenants({ usage, Panel }) {
  const { hours, tenants } = summed(usage);
  const shown = tenants.slice(0, COLORS.length - 1);
  const rest = tenants.slice(shown.length);
  if (rest.length) shown.push({ name: "others", hours: hours.map((_, i) => rest.reduce((sum, each) => sum + each.hours[i], 0)) });
  const columns = { time: hours, ...Object.fromEntries(shown.map((each, i) => [i, each.hours])) };
  const cost = (nano) => (nano ? `${(nano / 1e9).toFixed(2)} ${usage.currency}` : "–");
  return html`<${Panel} title="Tenants" note="the last 24 hours"><div class="table"><table class="latency">
      <thead><tr><th scope="col"><span class="sr">Tenant</span></th>${["Requests", "Prompt", "Output", "Engine", "Cost"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${tenants.map((each) => html`<tr><th scope="row">${each.name}</th><td>${formatCount(each.requests)}</td><td>${formatCount(each.prompt)}</td><td>${formatCount(each.output)}</td><td>${formatCount(each.step_ms / 1000)} s</td><td>${cost(each.nano)}</td></tr>`)}</tbody>
    </table></div><//>
    <${Panel} title="Time of the engine" note="seconds in each hour">
      <${Chart} history=${{ columns }} span=${24 * HOUR} label="Seconds of the engine" stacked=${true} series=${shown.map(({ name }, i) => ({ name, key: i, color: COLORS[i], step: true }))} />
    <//>`;
}
