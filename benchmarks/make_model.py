"""Writes a Hugging Face checkpoint of a real shape with random weights and the embedded model's tokenizer.

python benchmarks/make_model.py OUT_DIR --shape qwen3-0.6b
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.families import spec_from_config
from penstock.weights.packaged import embedded_model

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
# Heads of 64, an odd number of them or with a bias, sizes that are no power of two, a head of its own.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
QWEN3_MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
SHAPES = {
    "qwen3-0.6b": QWEN3
    | {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
    "smollm2-360m": LLAMA
    | {"vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
    | {"num_attention_heads": 15, "num_key_value_heads": 5, "max_position_embeddings": 8192},
    "qwen2.5-0.5b-untied": QWEN2
    | {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768},
    # Many equal layers and little beside them: stages of a pipeline that take equally long.
    "deep": QWEN3
    | {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 40960},
    # Two of the 48 layers of Qwen3-30B-A3B, and somewhat more than their share of its vocabulary.
    "qwen3-30b-a3b-2-layers": QWEN3_MOE
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    | {"vocab_size": 8192, "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False},
    # Small experts: the rest of the model weighs more than in the usual mixtures.
    "moe": QWEN3_MOE
    | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "intermediate_size": 3072}
    | {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 40960},
    "tiny": QWEN3
    | {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 40960},
}


def random_tensors(
    config: Mapping[str, Any], device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the bf16 tensor, on the device, of each parameter of a checkpoint."""
    source = torch.Generator(device).manual_seed(seed)
    for parameter in spec_from_config(config).parameters:
        for part in parameter.sources:
            size = (part.rows, *parameter.shape[1:])
            vector = len(size) == 1
            drawn = (
                torch.ones(size, device=device) if vector else torch.randn(size, generator=source, device=device) * 0.02
            )
            yield part.name, drawn.to(torch.bfloat16)


def write_model(folder: Path, shape: str, seed: int = 0) -> Path:
    """Writes a checkpoint to `folder`, unless it has a complete one. Returns the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, folder / name)
    save_file(dict(random_tensors(config, seed=seed)), folder / "partial", metadata={"format": "pt"})
    (folder / "partial").rename(folder / "model.safetensors")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_model(args.out, args.shape, args.seed))


if __name__ == "__main__":
    main()
