// Rollouts: the candidate's share of the requests, and what its judges have found.
import { html } from "../vendor/preact.js";
import { formatCount } from "../shared/shell.js";

// The interval of a judge on a line from -1 to 1, in units of its tolerance: the mark is where it rolls back.
function Band({ judge }) {
  const most = Math.max(2 * judge.tolerance, Math.min(1, Math.abs(judge.mean) * 1.5));
  const at = (value) => `${(50 + (50 * Math.max(-most, Math.min(most, value))) / most).toFixed(1)}%`;
  const width = `${(parseFloat(at(judge.high)) - parseFloat(at(judge.low))).toFixed(1)}%`;
  const bad = judge.low > judge.tolerance;
  return html`<div class="band" role="img" aria-label=${`from ${judge.low.toFixed(3)} to ${judge.high.toFixed(3)}, ${judge.tolerance} is tolerated`}>
    <i class="zero" style=${{ left: "50%" }}></i><i class="limit" style=${{ left: at(judge.tolerance) }}></i>
    ${judge.requests > 0 && html`<i class="interval ${bad ? "bad" : ""}" style=${{ left: at(judge.low), width }}></i><i class="mean" style=${{ left: at(judge.mean) }}></i>`}
  </div>`;
}

export function Rollouts({ rollouts, Panel }) {
  return rollouts.map(
    (each) => html`<${Panel} key=${each.name} title=${`Rollout of ${each.name}`} note=${`version ${each.candidate} in place of ${each.incumbent}`}>
      <p class="share"><b>${each.status}</b> ${each.reason}</p>
      <div class="shares" role="img" aria-label=${`${each.share}% of the requests`}>${each.plan.map((share) => html`<i class=${share <= each.share && each.status !== "rolled back" ? "reached" : ""}>${share ? `${share}%` : "shadow"}</i>`)}</div>
      <div class="table"><table class="latency">
        <thead><tr><th scope="col"><span class="sr">Judge</span></th><th scope="col">Pairs</th><th scope="col">Worse by (95%, at all times)</th></tr></thead>
        <tbody>${each.judges.map((judge) => html`<tr><th scope="row">${judge.name}</th><td>${formatCount(judge.requests)}</td><td><${Band} judge=${judge} /></td></tr>`)}</tbody>
      </table></div>
    <//>`,
  );
}
