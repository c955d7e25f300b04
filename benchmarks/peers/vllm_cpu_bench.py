"""Runs the cases of compare.py with vLLM on a CPU, without its prefix cache.

    python vllm_cpu_bench.py MODEL_DIR --cases 1x256/64,8x256/64

On two cores set VLLM_CPU_OMP_THREADS_BIND=0-1, VLLM_CPU_NUM_OF_RESERVED_CPU=0, VLLM_CPU_SGL_KERNEL=1 and
VLLM_CPU_KVCACHE_SPACE=4. Needs vllm-cpu.
"""

import numpy as np
from cases import parse, report
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, cases = parse()
    llm = LLM(model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, disable_log_stats=True)
    source = np.random.default_rng(0)

    def run(count: int, prompt: int, output: int) -> int:
        prompts = [{"prompt_token_ids": source.integers(10, 30000, prompt).tolist()} for _ in range(count)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0, detokenize=False)
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False))

    report(cases, run)
