"""Prints what Dynamo's offline replay says of a trace, as JSON: python dynamo_replay.py TRACE SPEED...

It runs where ai-dynamo is installed, without Penstock: eight workers of 16,384 blocks of 64 tokens, with its default
step times.
"""

import json
import sys

from dynamo.llm import MockEngineArgs
from dynamo.replay import run_trace_replay


def main(trace: str, speeds: list[float]) -> None:
    found = {}
    for speed in speeds:
        for router in ("round_robin", "kv_router"):
            report = run_trace_replay(
                trace,
                extra_engine_args=MockEngineArgs(
                    block_size=64, num_gpu_blocks=16384, max_num_seqs=256, max_num_batched_tokens=8192
                ),
                num_workers=8,
                router_mode=router,
                arrival_speedup_ratio=speed,
                trace_block_size=512,
                sla_ttft_ms=2000.0,
                sla_itl_ms=25.0,
            )
            found[f"x{speed:g} {router}"] = dict(getattr(report, "summary", report))
    print(json.dumps(found))


main(sys.argv[1], [float(each) for each in sys.argv[2:]])
