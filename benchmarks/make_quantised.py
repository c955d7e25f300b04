"""Writes a quantised checkpoint of a model in floats, rounded to the nearest: to measure speed, not quality.

    python benchmarks/make_quantised.py KIND MODEL_DIR OUT_DIR

KIND is one of tests/weights/quantised/writers.py, with groups of 128: gptq, gptq-act-order, awq, w4a16 or w8a8. One
tensor is in memory at a time, besides those that are written.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is not installed

from tests.weights.quantised import writers

GROUP = 128
KINDS = {
    "gptq": (writers.gptq(4, GROUP), writers.gptq_config(4, GROUP)),
    "gptq-act-order": (writers.gptq(4, GROUP, scattered=True), writers.gptq_config(4, GROUP, desc_act=True)),
    "awq": (writers.awq(GROUP), writers.AWQ_CONFIG | {"group_size": GROUP}),
    "w4a16": (writers.integers(4, GROUP), writers.compressed_config(4, GROUP)),
    "w8a8": (writers.integers(8, 0, pack=False), writers.compressed_config(8, 0, form="int-quantized")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write, config = KINDS[args.kind]
    tensors: writers.Tensors = {}
    for path in sorted(args.model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and not any(part in name for part in writers.PLAIN):
                    tensors |= write(name.removesuffix(".weight"), tensor)[0]
                else:
                    tensors[name] = tensor
    args.out.mkdir(parents=True)
    for path in args.model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and not path.name.endswith(".index.json"):
            shutil.copy(path, args.out)
    save_file({name: each.contiguous() for name, each in tensors.items()}, args.out / "model.safetensors")
    fields = {"quantization_config": config, "dtype": "bfloat16" if args.kind.startswith("w") else "float16"}
    path = args.out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2))


if __name__ == "__main__":
    main()
