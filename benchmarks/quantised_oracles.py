"""Compares the weights that Penstock reads from a quantised checkpoint with those that the tool itself makes of it.

    python benchmarks/quantised_oracles.py CHECKPOINT...

Each CHECKPOINT has `values/values.safetensors`, which `benchmarks/peers/quantise.py` wrote in the tool's environment.
Our values are rounded to the dtype of the tool's. A row has a type of tensors: how many matrices, how many of them are
equal to the last bit, and the largest difference, relative to the largest value of the matrix.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.families import load_spec
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.load import load_parameters


def compare(folder: Path) -> dict[str, list[tuple[bool, float]]]:
    """Of each type of tensors, for each matrix whether all bits are equal, and the largest difference."""
    spec, theirs = load_spec(folder), load_file(folder / "values" / "values.safetensors")
    types = {name: tensor.dtype for name, tensor in stored_tensors(folder, spec).items()}
    ours = load_parameters(folder, spec, torch.float32, progress=False)
    found: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for parameter in spec.parameters:
        for source in parameter.sources:
            if len(parameter.shape) != 2 or source.name not in theirs or types[source.name] in ("F32", "BF16", "F16"):
                continue
            want = theirs[source.name][source.first_row : source.end_row : source.step]
            got = ours[parameter.name][source.start : source.start + source.rows].to(want.dtype)
            largest = want.float().abs().max().item()
            difference = (got.float() - want.float()).abs().max().item() / largest
            found[types[source.name]].append((torch.equal(got, want), difference))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    wrong = 0
    for folder in parser.parse_args().checkpoints:
        for kind, rows in compare(folder).items():
            equal, worst = sum(same for same, _ in rows), max(difference for _, difference in rows)
            wrong += worst > 1e-6
            print(
                f"{folder.name:<24}{kind:<40}{len(rows):>5} matrices, {equal:>5} equal, largest difference {worst:.1e}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
