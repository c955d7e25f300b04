"""Runs the cases of compare.py with OpenVINO GenAI's continuous batching, without its prefix cache.

    python openvino_genai_bench.py EXPORTED_DIR --cases 1x256/64,8x256/64

EXPORTED_DIR is made by `optimum-cli export openvino --task text-generation-with-past`. Needs openvino-genai.
"""

import numpy as np
import openvino
import openvino_genai
from cases import parse, report

model, cases = parse()
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 4  # GB
scheduler.max_num_seqs = 64
scheduler.max_num_batched_tokens = 2048
scheduler.dynamic_split_fuse = True
scheduler.enable_prefix_caching = False
pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
source = np.random.default_rng(0)


def run(count: int, prompt: int, output: int) -> int:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output
    config.ignore_eos = True
    config.do_sample = False
    handles = []
    for i in range(count):
        ids = source.integers(10, 30000, (1, prompt)).astype(np.int64)
        handles.append(pipeline.add_request(i, openvino.Tensor(ids), config))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return sum(len(answer.generated_ids) for handle in handles for answer in handle.read_all())


report(cases, run)
