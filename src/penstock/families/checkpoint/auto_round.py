"""Checkpoints of AutoRound in its own format: matrices in the layout of GPTQ or AWQ, with settings of their own for
modules that `extra_config` names."""

import re
from typing import Any

from penstock.families.checkpoint.awq import Awq
from penstock.families.checkpoint.coded import Coded
from penstock.families.checkpoint.gptq import BITS, Gptq
from penstock.families.hf_config import HFConfig

# packing_format -> the checkpoint_format of GPTQ with these zero points, or None for AWQ
_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:auto_awq": None}
_PATTERN_CHARACTERS = set("*+?^$|()[]\\")


def auto_round(config: HFConfig, quantization: HFConfig) -> Coded:
    """The scheme of a quantization_config. Raises UnsupportedModel."""
    quantization.one_of("data_type", "int")
    layout = _PACKINGS[quantization.one_of("packing_format", *_PACKINGS)]
    extra = quantization.section("extra_config") or HFConfig({})
    rules: dict[str, dict[str, Any]] = {}
    kept = []
    for name in extra.names():
        fields = extra.section(name) or HFConfig({})
        pattern = name if _PATTERN_CHARACTERS & set(name) else f"{re.escape(name)}$"
        if fields.integer("bits", quantization.integer("bits")) > BITS[-1]:
            kept.append(name)
            rules[f"-:{pattern}"] = {}
        elif layout is None:
            raise extra.unsupported(name, "with settings of its own", "16 bits: the other modules of AWQ are alike")
        else:
            rules[f"+:{pattern}"] = {field: fields.get(field) for field in ("bits", "group_size", "sym")}
    if layout is None:
        made = {"version": "gemm", "zero_point": True, "modules_to_not_convert": kept}
        return Awq.of(config, quantization.with_fields(**made))
    made = {"checkpoint_format": layout, "dynamic": rules, "lm_head": "+:lm_head$" in rules}
    return Gptq.of(config, quantization.with_fields(**made))
