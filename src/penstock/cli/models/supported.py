"""Implements `penstock models`: the table of supported models."""

import json
from dataclasses import asdict

from penstock.cli.models.table import print_table
from penstock.families.supported import SupportedModel, supported_models
from penstock.families.transformers_model import INSTALL

_BEFORE = """# Supported models

`penstock models --markdown` prints this page.

Penstock executes models of these architectures, as `config.json` names them, from safetensors in float32, bfloat16,
float16 or [FP8](quantization.md#fp8-checkpoints), and gpt-oss' in MXFP4. If a GGUF architecture is named, GGUF files
are served too. Every model that gives text is served with continuous batching, chunked prompts, `--quantization int8`
and `int4`; those without states also with the prefix cache, speculation, on GPUs and over pipeline ranks.
[Embeddings](embeddings.md#models) has what the models that give vectors need.
"""
_AFTER = """
- **Tensor ranks**: whether `--tensor-parallel-size` above 1 is possible, for sizes that it divides. It is not
  possible if one norm spans all heads.
- **Expert ranks**: whether there are experts for `--expert-parallel` to divide.
- **States**: whether layers keep [states](architecture.md#states), which a sequence has for itself. These models run on
  a CPU, without the prefix cache, speculation and ranks.
- **FlashInfer**: whether `--attention-backend flashinfer` can compute its attention. Penstock's kernels
  always can.

DeepSeek's models run on a CPU, and keep their [latents](architecture.md#latents) in the model's dtype: there is no
`--kv-cache-dtype int8`.

In bfloat16 Mamba 2's residual is in bfloat16 too, with any `residual_in_fp32`.

Gemma 4's E2B and E4B run as one pipeline stage: layers read keys, values and embeddings that another stage would
have.

Two limits depend on the length of the context:

- Models with LongRoPE (Phi 3 and 4-mini with long contexts) have one set of frequencies for up to
  `original_max_position_embeddings` tokens, and one for more. `--max-model-len` decides for all requests. With the
  short set, results are those of transformers at every length; with the long set they differ for prompts that would
  fit the short one.
- Models with `"rope_type": "dynamic"` are served up to `max_position_embeddings`, where nothing is scaled yet.

## Other decoders

Penstock also serves decoders that are not in the table, with the code of the transformers package:

<!-- not run: changes the machine -->

    pip install 'penstock[transformers]'

It replaces one part of transformers: attention is Penstock's, with its paged KV cache. So these models have continuous
batching, chunked prompts, the prefix cache, grammars and all wires like any other. They are slower than
the models of the table, and need transformers' memory and seconds at the start; `plan` and the start say so.

- **Which**: classes `...ForCausalLM` of transformers 5 whose attention uses its AttentionInterface and keeps keys and
  values: Apertus, Arcee, dots.llm1, ERNIE 4.5, EXAONE 4, Granite MoE, Helium, Hunyuan, MiniMax M2, Nemotron,
  OLMo 1, OLMoE, Persimmon, Phi 1 to 2, Phi 3.5 MoE, Seed-OSS, StableLM, VaultGemma and more.
- **Proof**: the start computes two random prompts, in chunks and side by side, and compares logprobs with those of
  transformers' own attention. Each step checks that every layer called ours once, with the heads and the window of
  `config.json`.
- **Refused by name**: architectures that compute attention by themselves (BLOOM, MPT, GPT-Neo; GPT-J and CodeGen with
  old versions of transformers);
  linear and chunked attention, latents of other families, states, masks of their own; arguments of attention that ours
  does not have; rope of the types dynamic and longrope, whose frequencies depend on the batch.
- **Rounding**: torch's products may round differently in other batches. If two tokens score almost the same, either
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
        print_table([{name.upper(): text for name, text in _cells(row).items()} for row in rows])
        print(f"\nOther decoders of transformers run with its code, which is slower: {INSTALL}")


def page(rows: list[SupportedModel]) -> str:
    """Returns docs/supported-models.md."""
    columns = list(_cells(rows[0]))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = _cells(row)
        cells["Architecture"] = f"`{cells['Architecture']}`"
        lines.append(f"| {' | '.join(cells.values())} |")
    return "\n".join([_BEFORE, *lines, _AFTER])


def _cells(row: SupportedModel) -> dict[str, str]:
    flags = {
        "Tensor ranks": row.tensor_ranks,
        "Expert ranks": row.expert_ranks,
        "FlashInfer": row.flashinfer,
        "States": row.states,
    }
    texts = {"Models": row.models, "Architecture": row.architecture, "Gives": row.gives}
    texts["GGUF"] = ", ".join(row.gguf) or "-"
    return texts | {name: "yes" if flag else "no" for name, flag in flags.items()}
