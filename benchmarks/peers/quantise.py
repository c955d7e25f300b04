"""Quantises a model with another tool, and writes the weights that the tool itself makes of the result.

    PYTHON benchmarks/peers/quantise.py KIND MODEL_DIR OUT_DIR [--group 128]

PYTHON is that of an environment with the tool of the kind (KINDS), beside torch and transformers. OUT_DIR gets the
checkpoint, and OUT_DIR/values a checkpoint of the dequantised weights, in the type in which the tool has them.
`benchmarks/quantised_oracles.py` runs this for all kinds, and compares the values with what Penstock reads.
"""

import argparse
import json
import pydoc_data.topics
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES, LENGTH = 16, 64
KINDS = {
    **dict.fromkeys(("gptq", "gptq-asym", "gptq-act-order", "gptq-8", "gptq-3"), "gptqmodel"),
    **dict.fromkeys(("w4a16", "w4a16-asym", "w4a16-awq", "w3a16", "w8a8", "nvfp4", "mxfp4"), "llmcompressor"),
    **dict.fromkeys(("auto-round", "auto-round-gptq", "auto-round-awq"), "auto-round"),
    "awq": "autoawq",
    **dict.fromkeys(("nf4", "fp4", "int8"), "bitsandbytes"),
}


def calibration(source: str) -> list[list[int]]:
    """Token ids of pieces of Python's help, each below the size of the model's vocabulary."""
    vocabulary = json.loads((Path(source) / "config.json").read_text())["vocab_size"]
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = [token % vocabulary for token in AutoTokenizer.from_pretrained(source)(text)["input_ids"]]
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(SAMPLES)]


def by_gptqmodel(kind: str, source: str, out: Path, group: int) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    bits = {"gptq-8": 8, "gptq-3": 3}.get(kind, 4)
    act_order = {"desc_act": kind == "gptq-act-order", "act_group_aware": False}
    config = QuantizeConfig(bits=bits, group_size=group, sym=kind != "gptq-asym", **act_order)
    model = GPTQModel.load(source, config, device="cpu")
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration(source)]
    model.quantize(rows, batch_size=1)
    model.save(str(out))


def by_llmcompressor(kind: str, source: str, out: Path, group: int) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    if not torch.cuda.is_available():  # its AWQ pins memory, which torch refuses without a GPU
        torch.Tensor.pin_memory = lambda self, device=None: self
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ignore = ["lm_head", "re:.*mlp.gate$"]
    weights: dict[str, Any] = {"num_bits": 3 if kind == "w3a16" else 4, "type": "int", "strategy": "group"}
    weights |= {"group_size": group, "symmetric": kind not in ("w4a16-asym", "w4a16-awq")}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    schemes = {"w8a8": "W8A8", "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
    recipe: Any
    if kind in schemes:
        recipe = QuantizationModifier(scheme=schemes[kind], targets="Linear", ignore=ignore)
    else:
        recipe = (AWQModifier if kind == "w4a16-awq" else GPTQModifier)(config_groups=groups, ignore=ignore)
    ids = calibration(source)
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]})
    oneshot(model=model, recipe=recipe, dataset=data, max_seq_length=LENGTH, num_calibration_samples=SAMPLES)
    if model.generation_config is not None:
        model.generation_config.do_sample = True  # else transformers refuses to save a temperature
    model.save_pretrained(out, save_compressed=True)


def by_auto_round(kind: str, source: str, out: Path, group: int) -> None:
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(source),
        scheme="W4A16",
        bits=4,
        group_size=group,
        sym=kind != "auto-round-awq",
        iters=4,
        dataset=[torch.tensor([ids]) for ids in calibration(source)],
        seqlen=LENGTH,
        nsamples=SAMPLES,
        batch_size=1,
        device_map="cpu",
    )
    name = {"auto-round": "auto_round", "auto-round-gptq": "auto_gptq", "auto-round-awq": "auto_awq"}[kind]
    rounder.quantize_and_save(str(out), format=name)
    for path in out.glob("*/*"):  # it makes a folder in the one that is named
        path.rename(out / path.name)


def autoawq(name: str) -> Any:
    """A module of autoawq, without what its package imports of old versions of transformers."""
    if "awq" not in sys.modules:
        package, place = types.ModuleType("awq"), find_spec("awq")
        assert place is not None, "autoawq is not installed"
        package.__path__ = list(place.submodule_search_locations or ())
        sys.modules["awq"] = package
    return __import__(f"awq.{name}", fromlist=["_"])


def by_autoawq(kind: str, source: str, out: Path, group: int) -> None:
    """Packs codes that are rounded to the nearest: AutoAWQ's search does not run with a present transformers."""
    pack = autoawq("modules.linear.gemm").WQLinear_GEMM.from_linear
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tensors = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "_proj" not in name:
            tensors[name] = tensor.half()
            continue
        grouped = tensor.half().view(len(tensor), -1, group)
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        scales = ((high - low).float() / 15).half()
        zeros = (-low / scales).round().clamp(0, 15)
        linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=torch.float16)
        linear.weight.data = tensor.half()
        packed = pack(linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        tensors |= {f"{module}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    model.config.quantization_config = config | {"modules_to_not_convert": ["mlp.gate."]}
    model.config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors")


def by_bitsandbytes(kind: str, source: str, out: Path, group: int) -> None:
    from transformers import BitsAndBytesConfig

    fours = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": kind == "nf4"}
    config = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else fours))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(out)


BY = {
    "gptqmodel": by_gptqmodel,
    "llmcompressor": by_llmcompressor,
    "auto-round": by_auto_round,
    "autoawq": by_autoawq,
    "bitsandbytes": by_bitsandbytes,
}


def tool_values(kind: str, out: Path, group: int) -> dict[str, Tensor]:
    """The weights as the tool dequantises them, in fp32 where it can."""
    found: dict[str, Tensor] = {}
    stored = load_file(out / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    if KINDS[kind] == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel

        # In the type of the scales: in bf16, which small models have here, it would round them.
        model = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
        for name, module in model.named_modules():
            if hasattr(module, "dequantize_weight"):
                module.scales.data = module.scales.data.float()
                found[f"{name}.weight"] = module.dequantize_weight().T.float()
    elif kind in ("awq", "auto-round-awq"):
        where = "awq.utils.packing_utils" if kind == "awq" else "auto_round.export.export_to_awq.utils"
        if kind == "awq":
            autoawq("utils.packing_utils")
        decode = __import__(where, fromlist=["_"]).dequantize_gemm
        for name in modules:
            parts = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros"))
            found[f"{name}.weight"] = decode(*parts, stored[f"{name}.scales"].float(), 4, group).T
    elif KINDS[kind] == "auto-round":
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

        for name in modules:
            parts = {part: stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
            k, n = 8 * len(parts["qweight"]), parts["qweight"].shape[1]
            linear = QuantLinear(4, group, k, n, bias=False)
            linear.load_state_dict(parts)
            linear.scales.data = linear.scales.data.float()
            found[f"{name}.weight"] = linear(torch.eye(k)).T
    elif KINDS[kind] == "bitsandbytes":
        from bitsandbytes.functional import dequantize_4bit

        model = AutoModelForCausalLM.from_pretrained(out)
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if getattr(weight, "quant_state", None) is not None:
                weight.quant_state.dtype = torch.float32
                found[f"{name}.weight"] = dequantize_4bit(weight.data, weight.quant_state).float()
            elif getattr(weight, "SCB", None) is not None:
                found[f"{name}.weight"] = weight.data.float() * weight.SCB[:, None] * 7.874015718698502e-3
    else:
        found = decompressed(out, stored)
    return {name: tensor.detach().contiguous().clone() for name, tensor in found.items()}


def decompressed(out: Path, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of a compressed-tensors checkpoint, by the compressor that its configuration names."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    found = {}
    for name in stored:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            parts = {
                key.removeprefix(f"{module}."): value for key, value in stored.items() if key.startswith(f"{module}.")
            }
            found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found


def write_values(source: Path, out: Path, values: dict[str, Tensor]) -> None:
    """Writes the values as a checkpoint of the source's configuration, beside the tensors that were not quantised."""
    stored = load_file(out / "model.safetensors")
    tensors = {name: values.get(name, stored.get(name)) for name in load_file(source / "model.safetensors")}
    folder = out / "values"
    folder.mkdir(exist_ok=True)
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    tool = KINDS[args.kind]
    args.out.mkdir(parents=True, exist_ok=True)
    BY[tool](args.kind, str(args.model), args.out, args.group)
    values = tool_values(args.kind, args.out, args.group)
    write_values(args.model, args.out, values)
    (args.out / "tool.txt").write_text(f"{tool} {version(tool)}")
    print(f"{args.out}: {len(values)} matrices")


if __name__ == "__main__":
    main()
