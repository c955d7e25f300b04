"""Reads the folders that `penstock quantize` writes by the formats' definitions, with NumPy, into transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file


def words_to_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first codes of each row of words, [rows, count]."""
    data = np.ascontiguousarray(words.numpy()).view(np.uint8)
    each = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(len(data), count, bits)
    return torch.from_numpy((each.astype(np.int64) << np.arange(bits)).sum(-1)).float()


def decoded_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a compressed-tensors or GPTQ folder as fp32."""
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    found = {name: tensor.float() for name, tensor in stored.items() if tensor.dtype.is_floating_point}
    if config["quant_method"] == "gptq":
        return _gptq(stored, found, config)
    (group,) = config["config_groups"].values()
    bits, symmetric = group["weights"]["num_bits"], group["weights"]["symmetric"]
    for name, scale in list(found.items()):
        if not name.endswith(".weight_scale"):
            continue
        base = name.removesuffix("_scale")
        del found[name]
        if f"{base}_packed" in stored:
            rows, columns = stored[f"{base}_shape"].tolist()
            codes = words_to_codes(stored[f"{base}_packed"], bits, columns)
            zero = torch.tensor(float(1 << bits - 1))
            if not symmetric:
                zero = words_to_codes(stored[f"{base}_zero_point"].T, bits, rows).T
                zero = zero.repeat_interleave(columns // zero.shape[1], 1)
            codes = codes - zero
        else:
            codes = stored[base].float()
        found[base] = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return found


def _gptq(
    stored: dict[str, torch.Tensor], found: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    bits = config["bits"]
    for name in stored:
        if not name.endswith(".qweight"):
            continue
        base = name.removesuffix("qweight")
        groups, scales = stored[f"{base}g_idx"].long(), found.pop(f"{base}scales")
        codes = words_to_codes(stored[name].T, bits, len(groups))
        zeros = (words_to_codes(stored[f"{base}qzeros"], bits, scales.shape[1]) + 1) % (1 << bits)
        found[f"{base}weight"] = (codes - zeros[groups].T) * scales[groups].T
    return found


def transformers_model(folder: Path) -> Any:
    """The model of such a folder in fp32, with the values that its codes stand for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(decoded_tensors(folder), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def mean_nats(model: Any, windows: list[list[int]]) -> float:
    """The mean of -log p over all tokens but the first of each window."""
    total, count = 0.0, 0
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            logits = model(ids).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(window) - 1
    return total / count
