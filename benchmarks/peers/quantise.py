"""Quantises a model with another tool, and writes the weights that the tool itself makes of the result.

    PYTHON benchmarks/peers/quantise.py TOOL MODEL_DIR OUT_DIR [--group 128]

PYTHON is that of an environment with the tool: gptqmodel, llmcompressor or bitsandbytes, beside torch and transformers.
OUT_DIR gets the checkpoint, and `tool_values.pt.safetensors` below OUT_DIR/values the dequantised weights.
`benchmarks/quantised_oracles.py` compares them with what Penstock reads.
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES, LENGTH = 16, 128
TOOLS = (
    *("gptq", "gptq-asym", "gptq-act-order", "gptq-8", "gptq-3"),
    *("awq", "w4a16", "w4a16-asym", "rtn", "rtn-asym", "w8a8", "nvfp4"),
    *("nf4", "fp4", "int8"),
)


def texts(tokenizer: Any) -> list[list[int]]:
    """Token ids of pieces of Python's help."""
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text)["input_ids"]
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(SAMPLES)]


def by_gptqmodel(tool: str, source: str, out: Path, group: int) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    bits = {"gptq-8": 8, "gptq-3": 3}.get(tool, 4)
    act_order = {"desc_act": tool == "gptq-act-order", "act_group_aware": False}
    config = QuantizeConfig(bits=bits, group_size=group, sym=tool != "gptq-asym", **act_order)
    model = GPTQModel.load(source, config, device="cpu")
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts(model.tokenizer)]
    model.quantize(rows, batch_size=1)
    model.save(str(out))


def by_llmcompressor(tool: str, source: str, out: Path, group: int) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    common = {"targets": "Linear", "ignore": ["lm_head"]}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    scheme = {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": not tool.endswith("-asym")}}}
    if tool == "awq":
        from llmcompressor.modifiers.awq import AWQModifier

        scheme["group_0"]["weights"]["symmetric"] = False
        recipe: Any = AWQModifier(config_groups=scheme, ignore=["lm_head"])
    elif tool.startswith("rtn"):
        recipe = QuantizationModifier(config_groups=scheme, ignore=["lm_head"])
    elif tool in ("w8a8", "nvfp4"):
        recipe = QuantizationModifier(scheme="W8A8" if tool == "w8a8" else "NVFP4A16", **common)
    else:
        recipe = GPTQModifier(config_groups=scheme, ignore=["lm_head"])
    ids = texts(tokenizer)
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]})
    calibration = {"dataset": data, "max_seq_length": LENGTH, "num_calibration_samples": SAMPLES}
    oneshot(model=model, recipe=recipe, **({} if tool.startswith("rtn") else calibration))
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def by_bitsandbytes(tool: str, source: str, out: Path, group: int) -> None:
    from transformers import BitsAndBytesConfig

    fours = {"load_in_4bit": True, "bnb_4bit_quant_type": tool, "bnb_4bit_use_double_quant": tool == "nf4"}
    config = BitsAndBytesConfig(**({"load_in_8bit": True} if tool == "int8" else fours))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def tool_values(tool: str, out: Path) -> dict[str, torch.Tensor]:
    """The weights as the tool dequantises them, in fp32 where it can."""
    found: dict[str, torch.Tensor] = {}
    if tool.startswith("gptq"):
        from gptqmodel import BACKEND, GPTQModel

        model = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH).model
        for name, module in model.named_modules():
            if hasattr(module, "dequantize_weight"):
                module.scales.data = module.scales.data.float()
                found[f"{name}.weight"] = module.dequantize_weight().T.float().contiguous()
    elif tool in ("nf4", "fp4", "int8"):
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
        from compressed_tensors.compressors import ModelCompressor

        model = AutoModelForCausalLM.from_pretrained(out)
        ModelCompressor.from_pretrained_model(model).decompress_model(model)
        found = {name: tensor for name, tensor in model.state_dict().items() if tensor.dim() == 2}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    by = by_gptqmodel if args.tool.startswith("gptq") else by_llmcompressor
    by = by_bitsandbytes if args.tool in ("nf4", "fp4", "int8") else by
    by(args.tool, args.model, args.out, args.group)
    (args.out / "values").mkdir(exist_ok=True)
    values = {name: tensor.contiguous().clone() for name, tensor in tool_values(args.tool, args.out).items()}
    save_file(values, args.out / "values" / "values.safetensors")
    print(f"{args.out}: {len(values)} matrices")


if __name__ == "__main__":
    main()
