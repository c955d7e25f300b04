// The last five minutes of a server, from answers of /server_load.

const SECONDS = 300;
const GAP = 5; // seconds between two answers after which the line of a chart is broken

// Percentiles of what happened between two histograms, interpolated within a bucket.
export class Percentiles {
  constructor(first, last) {
    this.buckets = last.map(([bound, count], i) => [bound, count - (first[i]?.[1] ?? 0)]);
    this.count = this.buckets.at(-1)?.[1] ?? 0;
  }

  at(rank) {
    if (!(this.count > 0)) return null;
    const target = (rank / 100) * this.count;
    let below = 0;
    let low = 0;
    for (const [bound, count] of this.buckets) {
      if (count >= target) return bound === null ? low : low + ((bound - low) * (target - below)) / (count - below);
      below = count;
      low = bound ?? low;
    }
    return low;
  }
}

const KEYS = ["time", "output", "prefill", "running", "waiting", "decodeStep", "prefillStep", "forward", "sample", "host"];

export class History {
  constructor() {
    this.answers = [];
    this.clear();
  }

  clear() {
    this.columns = Object.fromEntries(KEYS.map((key) => [key, []]));
  }

  get now() {
    return this.answers.at(-1);
  }

  add(answer) {
    const before = this.now;
    const restarted = before && (answer.time < before.time || answer.counters.generation_tokens < before.counters.generation_tokens);
    if (restarted) {
      this.answers = [];
      this.clear();
    }
    answer.at = Date.now() / 1000;
    this.answers.push(answer);
    this.point(answer, restarted ? undefined : before);
    while (this.answers.length > 2 && answer.at - this.answers[0].at > SECONDS) this.answers.shift();
    while (this.columns.time[0] < answer.at - SECONDS) for (const key of KEYS) this.columns[key].shift();
    const [first] = this.answers;
    for (const name of ["ttft", "tpot", "queue", "e2e"]) this[name] = new Percentiles(first.histograms[name], answer.histograms[name]);
    const queries = answer.counters.prefix_queries - first.counters.prefix_queries;
    this.hits = queries > 0 ? (answer.counters.prefix_hits - first.counters.prefix_hits) / queries : null;
    const total = answer.blocks.reduce((sum, pool) => sum + pool.total, 0);
    this.held = total ? answer.blocks.reduce((sum, pool) => sum + pool.held, 0) / total : 0;
  }

  point(answer, before) {
    const seconds = before ? answer.time - before.time : 0;
    const since = (name) => (before ? answer.counters[name] - before.counters[name] : 0);
    const steps = since("steps");
    const output = since("generation_tokens");
    const decode = Math.min(output, since("computed_tokens"));
    const each = (value) => (steps ? value / steps : 0);
    const milliseconds = (name) => each(since(name)) * 1000;
    const values = {
      time: answer.at,
      output: seconds ? output / seconds : 0,
      prefill: seconds ? since("prompt_tokens") / seconds : 0,
      running: answer.running,
      waiting: answer.waiting,
      decodeStep: each(decode),
      prefillStep: each(since("computed_tokens") - decode),
      forward: milliseconds("forward_seconds"),
      sample: milliseconds("sample_seconds"),
      host: Math.max(0, milliseconds("step_seconds") - milliseconds("forward_seconds") - milliseconds("sample_seconds")),
    };
    if (before && answer.at - before.at > GAP) {
      for (const key of KEYS) this.columns[key].push(key === "time" ? before.at + 1 : null);
    }
    for (const key of KEYS) this.columns[key].push(values[key]);
    this.last = values;
  }
}

export const WINDOW = SECONDS;
