"""Writes a checkpoint as a Hugging Face model folder: bf16 weights, config, tokenizer and licence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .network import RMS_EPS, ROPE_THETA, SHAPES, Shape
from .vocabulary import END_OF_TEXT, SPECIAL_TOKENS

# The model completes code and does not converse: user messages become comments, and its answers stay code.
# Greedy text repeats itself, and at a temperature of 1 too little of it is Python.
SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['content'] is string -%}
        {%- set text = message['content'] -%}
    {%- else -%}
        {%- set parts = message['content'] | selectattr('type', 'equalto', 'text') -%}
        {%- set text = parts | map(attribute='text') | join('\\n') -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- text + '\\n' -}}
    {%- else -%}
        {%- for line in (text | trim).split('\\n') -%}
            {{- ('# ' + line).rstrip() + '\\n' -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""


def model_config(shape: Shape) -> dict[str, object]:
    """Return ``config.json`` of transformers' Qwen3 for ``shape``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": RMS_EPS,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def tokenizer_config(shape: Shape) -> dict[str, object]:
    added = {
        str(i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": shape.max_positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export_model(work: Path, kind: str, licence: Path, target: Path) -> None:
    """Write the model folder ``target`` from the checkpoint, facts and tokenizer in ``work``.

    ``training.json`` keeps the facts and counts of the run; the optimisers' state stays behind.
    """
    target.mkdir(parents=True, exist_ok=True)
    facts = json.loads((work / f"{kind}.json").read_text(encoding="utf-8"))
    with safe_open(str(work / f"{kind}.safetensors"), "pt") as source:
        names = [name for name in source.keys() if name.startswith("model.")]  # noqa: SIM118
        weights = {name: source.get_tensor(name).to(torch.bfloat16).contiguous() for name in names}
        counts = json.loads(source.metadata()["counts"])
    shape = replace(SHAPES[kind], layers=counts["layers"])  # an unfinished run may still have half of its layers
    parameters = sum(tensor.numel() for tensor in weights.values())
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # save_file makes it readable only by its owner
    _write_json(target / "training.json", facts | counts | {"parameters": parameters})
    _write_json(target / "config.json", model_config(shape))
    _write_json(target / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0, **SAMPLING})
    _write_json(target / "tokenizer_config.json", tokenizer_config(shape))
    _write_json(target / "special_tokens_map.json", {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})
    shutil.copyfile(work / "tokenizer.json", target / "tokenizer.json")
    shutil.copyfile(licence, target / "LICENSE-PSF.txt")
