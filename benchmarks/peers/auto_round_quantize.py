"""Quantises a checkpoint with AutoRound. Runs in an environment that has it.

    python auto_round_quantize.py MODEL_DIR OUT_DIR WINDOWS.json --bits 4 --group 32 [--zero-points] [--steps 200]

WINDOWS.json is a list of windows of token ids, of equal length: the calibration. All layers but the head are quantised.
Prints the seconds that it took.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("windows", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--zero-points", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="of the optimiser for each layer; the tool's default")
    args = parser.parse_args()
    windows = json.loads(args.windows.read_text())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.generation_config.do_sample = True  # else transformers refuses to save a temperature
    began = time.perf_counter()
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(args.model),
        scheme=f"W{args.bits}A16",
        bits=args.bits,
        group_size=args.group,
        sym=not args.zero_points,
        iters=args.steps,
        dataset=[torch.tensor([window]) for window in windows],
        seqlen=len(windows[0]),
        nsamples=len(windows),
        device_map="cpu",
        enable_torch_compile=False,  # compiling takes longer than a small model's steps
    )
    rounder.quantize_and_save(str(args.out), format="auto_round")
    for path in args.out.glob("*/*"):  # it makes a folder in the one that is named
        path.rename(args.out / path.name)
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
