"""Makes small checkpoints with the tools that quantise, and compares the weights that Penstock reads of them with those
that the tools themselves make of them.

    python benchmarks/quantised_oracles.py WORK --python gptqmodel=../gptq/bin/python
    python benchmarks/quantised_oracles.py WORK --model ./Qwen3-0.6B --group 128 --python awq=…

Without --model the models are a dense one and a mixture with random weights. Each kind of a tool that has a --python
is made in WORK by `benchmarks/peers/quantise.py`, unless it is there. A row has a kind: how many matrices, how many of
them are equal to the last bit, in the tool's type, and the largest difference over the largest value of a matrix.

`--keep tests/weights/quantised/written` writes what that folder's test needs: the checkpoint, digests of the tool's
values, and logits of transformers with these values.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is not installed

from quantise import KINDS

from tests.weights.quantised.test_tools import TOKENS, coded_matrices, digest
from tests.weights.quantised.writers import write_floats

SCRIPT = Path(__file__).parent / "peers" / "quantise.py"
# Of the small models' MLPs. bitsandbytes 0.50.2 decodes rows that are no whole blocks of 64 wrongly on a CPU.
WIDTHS = {tool: 128 if tool == "bitsandbytes" else 96 for tool in KINDS.values()}
ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "TORCHDYNAMO_DISABLE": "1"}  # GPTQModel does not start with one worker
OF_MIXTURES = ("gptq", "w4a16-asym", "nvfp4", "auto-round", "awq")
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
SIZES |= {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}


def compare(folder: Path) -> Iterator[tuple[bool, float]]:
    """Of each matrix, whether all bits are equal, and the largest difference."""
    theirs = load_file(folder / "values" / "model.safetensors")
    for name, ours in coded_matrices(folder):
        want = theirs[name]
        got = ours.to(want.dtype)
        difference = (got.float() - want.float()).abs().max().item() / want.float().abs().max().item()
        yield torch.equal(got, want), difference


def logits(folder: Path) -> Tensor:
    """The logits of TOKENS by transformers, in fp32, with the tool's values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "values", dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def small_model(work: Path, *, moe: bool, intermediate: int) -> Path:
    """A model with random weights, written once."""
    folder = work / f"{'moe' if moe else 'dense'}-{intermediate}"
    if not folder.exists():
        write_floats(folder, moe=moe, intermediate=intermediate, num_hidden_layers=1 if moe else 2, **SIZES)
    return folder


def keep(folder: Path, to: Path) -> None:
    """Writes the checkpoint of a kind and what is expected of it."""
    to.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name in ("model.safetensors", "config.json", "quantize_config.json"):
            shutil.copyfile(path, to / path.name)
    theirs = load_file(folder / "values" / "model.safetensors")
    ours = dict(coded_matrices(folder))
    (dtype,) = {theirs[name].dtype for name in ours}
    digests = {
        name: digest(theirs[name]) for name, matrix in ours.items() if torch.equal(matrix.to(dtype), theirs[name])
    }
    metadata = {
        "tool": (folder / "tool.txt").read_text(),
        "dtype": str(dtype).removeprefix("torch."),
        "values": json.dumps(digests),
    }
    save_file({"logits": logits(folder)}, to / "expected.safetensors", metadata)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PATH")
    parser.add_argument("--kinds", help="comma-separated; without, all of the tools")
    parser.add_argument("--model", type=Path, help="a checkpoint in floats")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    pythons, wrong = dict(text.split("=", 1) for text in args.python), 0
    wanted = args.kinds.split(",") if args.kinds else [kind for kind, tool in KINDS.items() if tool in pythons]
    for kind in wanted:
        for end in ("", "-moe") if kind in OF_MIXTURES and not args.model else ("",):
            source = args.model or small_model(
                args.work, moe=bool(end), intermediate=64 if end else WIDTHS[KINDS[kind]]
            )
            folder = args.work / f"{kind}{end}"
            if not (folder / "tool.txt").exists():
                python, script = pythons[KINDS[kind]], str(SCRIPT)
                command = (python, script, kind, str(source), str(folder), "--group", str(args.group))
                subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | ENVIRONMENT)
            rows = list(compare(folder))
            equal, worst = sum(same for same, _ in rows), max(difference for _, difference in rows)
            wrong += worst > 1e-6
            tool = (folder / "tool.txt").read_text()
            print(f"{kind + end:<20}{tool:<24}{len(rows):>4} matrices, {equal:>4} equal, difference {worst:.1e}")
            if args.keep:
                keep(folder, args.keep / f"{kind}{end}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
