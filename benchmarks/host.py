"""Measures the host work of a step: its µs outside the forward and the sampler, mean over all steps of a case.

    python benchmarks/host.py --json benchmarks/results/avx512/host.json

The cases are the standard ones; steps that compute prompts count as well. The client runs beside the engine, as in
`penstock bench throughput`, whose figures these are. The median of the runs by tokens per second is reported.
"""

import tempfile
from pathlib import Path

from compare import bench_throughput
from make_model import write_model
from results import parser, write

CASES = "1x256/64,8x256/64,32x256/128"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, help="a checkpoint's folder; default: random weights of --shape")
    arguments.add_argument("--shape", default="qwen3-0.6b", help="a shape of make_model.py")
    arguments.add_argument("--flags", default="--quantization int4 --kv-cache-dtype int8", help="of the engine")
    arguments.add_argument("--cases", default=CASES, help="NxIN/OUT, comma-separated")
    arguments.add_argument("--runs", type=int, default=3, help="runs of each case")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model(Path(folder) / args.shape, args.shape)
        rows = bench_throughput(str(model), args.flags, args.cases, args.runs)
    result = {
        "benchmark": "host",
        "model": args.model.name if args.model else args.shape,
        "flags": args.flags,
        "host_us_per_step": {row["case"]: row["host_us_per_step"] for row in rows},
        "cases": rows,
    }
    write(result, args.json)


if __name__ == "__main__":
    main()
