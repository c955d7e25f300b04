"""Quantises a checkpoint with llmcompressor's GPTQ or AWQ. Runs in an environment that has it.

    python llmcompressor_quantize.py MODEL_DIR OUT_DIR WINDOWS.json --method gptq --bits 4 --group 32 [--zero-points]

WINDOWS.json is a list of windows of token ids, of equal length: the calibration. All layers but the head are quantised.
Prints the seconds that it took.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def recipe(method: str, bits: int, group: int, *, zero_points: bool) -> Any:
    """The modifiers, with the tool's own defaults but for the format."""
    weights = QuantizationArgs(
        num_bits=bits,
        type="int",
        strategy="group" if group else "channel",
        group_size=group or None,
        symmetric=not zero_points,
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if method == "gptq":
        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.awq import AWQModifier

    return AWQModifier(config_groups=groups, ignore=["lm_head"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("windows", type=Path)
    parser.add_argument("--method", choices=("gptq", "awq"), required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--zero-points", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():  # its AWQ pins memory, which torch refuses without a GPU
        torch.Tensor.pin_memory = lambda self, device=None: self
    windows = json.loads(args.windows.read_text())
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]})
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    began = time.perf_counter()
    oneshot(
        model=model,
        processor=AutoTokenizer.from_pretrained(args.model),
        dataset=data,
        recipe=recipe(args.method, args.bits, args.group, zero_points=args.zero_points),
        max_seq_length=max(map(len, windows)),
        num_calibration_samples=len(windows),
    )
    seconds = time.perf_counter() - began
    model.generation_config.do_sample = True  # else transformers refuses to save a temperature
    model.save_pretrained(args.out, save_compressed=True)
    print(json.dumps({"seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
