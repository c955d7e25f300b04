"""Writes tiny checkpoints with a tokenizer: folders that can be served."""

import json
import math
from pathlib import Path
from typing import Any

from tests.checkpoints.sizes import END, MAX_POSITION, SIZES
from tests.checkpoints.variants import VARIANTS, WITH_OFFSET

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = [
    "The pipe that keeps a turbine under full head is called a penstock.",
    "def add(first, second):\n    return first + second\n",
    "Prompts and weights go in, a stream of tokens comes out.",
]


def write_tiny_checkpoint(
    family_variant: str, folder: Path, *, dtype: str = "float32", seed: int = 0, shards: int | None = None
) -> Path:
    """Write a model of VARIANTS and its tokenizer to `folder`; with `shards`, its tensors in so many files."""
    import torch

    model = tiny_model(family_variant, seed=seed).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if shards is not None:
        split_checkpoint(folder, shards)
    write_tokenizer(folder)
    return folder


def tiny_model(family_variant: str, *, seed: int = 0) -> Any:
    """The transformers model of a variant with random fp32 weights, in eval mode."""
    import transformers

    family, changes = VARIANTS[family_variant]
    text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SIZES, **changes})
    if getattr(config, "attn_logit_softcapping", None):  # torch's attention, which 5.17 chose, leaves it out
        config._attn_implementation = "eager"
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    randomise(model, seed, norm_mean=0.0 if family in WITH_OFFSET else 1.0)
    return model


def randomise(model: Any, seed: int, *, norm_mean: float) -> None:
    """Draw every parameter anew, each from a generator of its own so that a variant's other tensors do not matter."""
    import torch

    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(seed * 1000 + index)
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                mean = 0.0 if name.endswith("bias") else norm_mean
                parameter.copy_(mean + 0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                generator = torch.Generator().manual_seed(seed * 1000 + len(name))
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def split_checkpoint(folder: Path, shards: int) -> None:
    """Turn model.safetensors into shards with an index, as large models come."""
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    places = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(tensors.items())[number::shards])
        save_file(mine, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(mine, name))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with three special tokens, all 256 bytes and a few merges, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 8, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[END],
        "pad_token": special[END],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
