"""Implements `penstock models`: the table of supported models."""

import json
from dataclasses import asdict

from penstock.cli.models.table import print_table
from penstock.families.supported import SupportedModel, supported_models
from penstock.families.transformers_model import INSTALL

_BEFORE = """# Supported models

`penstock models --markdown` prints this page.

Penstock executes models of these architectures, as `config.json` names them, from safetensors in float32, bfloat16,
float16, as GPTQ, AWQ, compressed-tensors, ModelOpt and bitsandbytes [quantise](quantization.md#quantised-checkpoints)
them, or in FP8, and gpt-oss' in MXFP4. If a GGUF architecture is named, GGUF files are served too. Every model that
gives text is served with continuous batching and chunked prompts. [Embeddings](embeddings.md#models) has what the
models that give vectors need.
"""
_AFTER = """
- **Ranks**: what can divide the model: `--tensor-parallel-size` by sizes that it divides, `--pipeline-parallel-size`,
  `--expert-parallel`. One norm over all heads cannot be divided among tensor ranks.
- **Quantised**: values of `--quantization` on a CPU; "KV" means that `--kv-cache-dtype int8` is possible, which it is
  not for [latents](architecture.md#latents).
- **Prefix cache**, **Speculation**: models whose layers keep [states](architecture.md#states), which a sequence has for
  itself, have neither. By default there is [speculation](speculation.md#flags) on a CPU with one pipeline stage only.
- **GPU**: whether it runs on a GPU, with Penstock's kernels.

In bfloat16 Mamba 2's residual is in bfloat16 too, with any `residual_in_fp32`.

Gemma 4's E2B and E4B run as one pipeline stage: layers read keys, values and embeddings that another stage would
have.

Some limits depend on the length of the context:

- Models with `"rope_type": "yarn"` or `"linear"` are served up to `factor` times the original length, or up to
  `max_position_embeddings` if that is more, as in vLLM.
- Models with LongRoPE (Phi 3 and 4-mini with long contexts) have one set of frequencies for up to
  `original_max_position_embeddings` tokens, and one for more. `--max-model-len` decides for all requests. With the
  short set, results are those of transformers at every length; with the long set they differ for prompts that would
  fit the short one.
- Models with `"rope_type": "dynamic"` are served up to `max_position_embeddings`, where nothing is scaled yet. Beyond
  it, transformers computes the frequencies anew from the longest sequence of the batch at each step, while the keys in
  the cache keep those of the step that made them. A token would depend on the batch and on the chunks of its prompt.

## Other decoders

Penstock also serves decoders that are not in the table, with the code of the transformers package:

    pip install 'penstock[transformers]'

Attention is Penstock's, with its paged KV cache. So these models have continuous batching, chunked prompts, the prefix
cache, grammars and all wires like any other. At the start, one forward shows what else Penstock's kernels compute. The
start says which of three cases a model is:

- torch computes nothing in a step, and steps are recorded like those of the models of the table: Arcee, ERNIE 4.5,
  EXAONE 4, GPTBigCode, Jais 2, Phi 1 to 2, StableLM.
- torch computes modules that Penstock has no kernel for, such as mixtures or norms of a family, and the rest is
  recorded: Apertus, BitNet, dots.llm1, Helium, MiniMax M2, Nemotron, OLMo 1, OLMoE, Phi 3.5 MoE.
- torch computes all but attention, linear modules, usual norms and MLPs, which is slower: others.

All need transformers' memory and seconds at the start. Eight sequences of Arcee or Phi are served 4.1 to 4.3 times as
fast as by `transformers.generate` if all have one length, and 5.1 to 6.1 times if lengths differ
(`benchmarks/fallback.py`).

- **Which**: classes `...ForCausalLM` of transformers 5 whose attention uses its AttentionInterface and keeps keys and
  values: those above, and CodeGen, FlexOlmo, GPT-J, Granite MoE, Hunyuan, NanoChat, Persimmon, VaultGemma and more.
- **Proof**: the start computes two random prompts, in chunks and side by side, and compares logprobs with those of
  transformers' own code. That every layer calls ours once, with the heads and the window of `config.json`, is checked
  too.
- **Refused by name**: architectures that compute attention by themselves (BLOOM, MPT, GPT-Neo; GPT-J and CodeGen with
  old versions of transformers);
  linear and chunked attention, latents of other families, states, masks of their own; arguments of attention that ours
  does not have; rope of the types dynamic and longrope, whose frequencies depend on the batch.
- **Rounding**: what torch computes may round differently in other batches. If two tokens score almost the same, either
  may be chosen, which the models of the table exclude on a CPU.
- **Code**: only that of the package. Code in a model's folder (`auto_map`) is never run.
- **Not yet**: GPUs, quantisation, ranks, speculation, GGUF.

Your model is not here, or too slow? [Adding a family](adding-a-model.md) takes a short file of data.
"""


def print_supported(as_json: bool, markdown: bool) -> None:
    """Prints the table: for people, as JSON, or as docs/supported-models.md."""
    rows = supported_models()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif markdown:
        print(page(rows), end="")
    else:
        print_table([_short_cells(row) for row in rows])
        print("\nRANKS: T tensor, P pipeline, E expert. CACHE: of prefixes. DRAFTS: speculation.")
        print(f"Other decoders of transformers run with its code, which is slower: {INSTALL}")


def page(rows: list[SupportedModel]) -> str:
    """Returns docs/supported-models.md."""
    columns = list(_cells(rows[0]))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(_cells(row).values())} |" for row in rows]
    return "\n".join([_BEFORE, *lines, _AFTER])


def _cells(row: SupportedModel) -> dict[str, str]:
    """The cells of the page."""
    return {
        "Models": row.models,
        "Architecture": f"`{row.architecture}`",
        "Gives": row.gives,
        "GGUF": ", ".join(row.gguf) or "-",
        "Ranks": ", ".join(row.ranks) or "-",
        "Quantised": ", ".join(_quantised(row)),
        "Prefix cache": _yes(row.prefix_cache),
        "Speculation": _yes(row.speculation),
        "GPU": _yes(row.gpu),
    }


def _short_cells(row: SupportedModel) -> dict[str, str]:
    """The cells for a terminal. What a model combines with comes first, and fits into 80 characters a line."""
    return {
        "MODELS": row.models,
        "RANKS": "".join(name[0].upper() for name in row.ranks) or "-",
        "QUANTISED": " ".join(_quantised(row)),
        "CACHE": _yes(row.prefix_cache),
        "DRAFTS": _yes(row.speculation),
        "GPU": _yes(row.gpu),
        "GIVES": row.gives,
        "GGUF": ", ".join(row.gguf) or "-",
        "ARCHITECTURE": row.architecture,
    }


def _quantised(row: SupportedModel) -> list[str]:
    return [*row.quantization, *(["KV"] if row.quantized_kv else [])]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
