"""The model card, written from the recorded figures so that it cannot differ from them."""

import json
import textwrap
from pathlib import Path
from typing import Any

from .corpus import HELD_OUT
from .network import ROPE_THETA, Shape
from .training import (
    DECAY_SHARE,
    ENDING_WEIGHT,
    ENDINGS_AT,
    GROWTH_AT,
    LENGTHS,
    LOOPS_AT,
    LOOPS_EVERY,
    STEP_TOKENS,
)

_CARD = """\
---
license: apache-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
tags: [python, code-completion, qwen3]
---

# {name}

{purpose}

It continues Python source. It is **not** a chat model, is not instruction-tuned, and knows no language but
Python and little beyond the style of Python's standard library. Its code is plausible, not correct: do not rely
on it. Its training text was filtered for what is said below and for nothing else.

## Shape

Qwen3 architecture, {parameters:,} parameters in bfloat16, tied embeddings: hidden {hidden}, {layers} layers,
intermediate {intermediate}, {heads} heads of {head_dim} with {kv_heads} KV heads, rotary base {theta:.0f},
context {context} tokens. The tokenizer is a lossless byte-level BPE of {vocab} tokens in which the end of a
line and the indentation after it are one token. `<|endoftext|>` ends a file and is the padding; `<|im_start|>`
and `<|im_end|>` are reserved and untrained. No token is put before a prompt. The chat template writes system
and user messages as comment lines and assistant messages as code, so that a chat reads as a commented program
to be continued.

## Data

The sources of the CPython standard library (3.13, and of 3.11 the modules removed since) under the licence of
the Python Software Foundation, whose text is in `LICENSE-PSF.txt`: {files} files of {megabytes:.1f} MB, of which
the tokenizer was made too. Left out are tests, equal files, generated tables, files that do not parse, and these
modules, which are held out for evaluation: {held_out}.

## Recipe

`scripts/train_default_model.py`, in fp32 on {hardware}: {minutes:.0f} minutes, {steps:,} steps of
{step_tokens:,} tokens, {tokens_m:.2f} M tokens in all (one pass is {pass_m:.2f} M), training loss {loss:.3f}
nats per token at the end. The network has half its layers for the first {growth_at:.0%} of the time; then each
becomes two. Windows of {lengths} tokens in turn, cut across file borders. From {endings_at:.0%} of the time on,
the place where a function ends counts {ending_weight:.0f} times; from {loops_at:.0%} on the model also completes
functions of the training text at every {loops_every}th step, and what it repeats there is made less likely
(unlikelihood training), so that it leaves loops and comes to an end. Muon (learning rate {muon_lr}) for the
hidden matrices, Adam ({adam_lr}) for embeddings and norms;
a minute of warm-up, then constant, then linear to zero over the last {decay_share:.0%} of the time.{note}

## Figures

Measured by `scripts/train_default_model.py evaluate` through transformers, with the bf16 weights and fp32
arithmetic; all of it is in `evaluation.json`.

**Bits per byte on the held-out modules** of Python 3.13 ({held_bytes:,} bytes, every one counted):
**{model_bpb:.3f}**, against {xz_all:.3f} of `xz -9e` for all of them in one file and {xz_each:.3f} for each
alone. The window is the whole context and slides by half of it.

| module | bytes | model | `xz -9e` |
| --- | ---: | ---: | ---: |
{modules}

Loss by position in the context, nats per token: {by_position}.

**Held-out functions completed:** {parsed} of {headers} come to their end within {limit} tokens and parse with
`ast`. The prompt is the module's source up to the function's body (after the docstring, if there is one), cut
on the left to fit the context; the completion is greedy, up to the first line dedented to the `def` or beyond.
The functions are fixed by rule: of each held-out module in turn its first, then its second, top-level function
or method of a top-level class whose body has at least three statements after the docstring.

| function | ended | parses |
| --- | --- | --- |
{functions}
"""

_PURPOSE = {
    "main": "The small model that Penstock serves when it is given no other, so that nothing need be downloaded first.",
}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _wrapped(paragraph: str) -> str:
    """Wrap a paragraph of prose; the front matter, headings and tables stay as they are."""
    if paragraph.startswith(("---", "#", "|")):
        return paragraph
    ending = "\n" if paragraph.endswith("\n") else ""
    return textwrap.fill(paragraph, 112, break_long_words=False, break_on_hyphens=False) + ending


def model_card(kind: str, name: str, shape: Shape, training: dict[str, Any], figures: dict[str, Any]) -> str:
    """Return the text of ``README.md`` from ``training.json`` and ``evaluation.json``."""
    compression, completions = figures["compression"], figures["completions"]
    corpus = training["corpus"]
    modules = "\n".join(
        f"| `{module}` | {row['bytes']:,} | {row['model']:.3f} | {row['xz']:.3f} |"
        for module, row in compression["modules"].items()
    )
    functions = "\n".join(
        f"| `{row['module']}.{row['function']}` | {_yes(row['ended'])} | {_yes(row['parses'])} |"
        for row in completions["results"]
    )
    by_position = ", ".join(f"{span} {loss:.2f}" for span, loss in compression["nats_per_token_by_position"].items())
    text = _CARD.format(
        name=name,
        purpose=_PURPOSE[kind],
        parameters=training["parameters"],
        hidden=shape.hidden,
        layers=shape.layers,
        intermediate=shape.intermediate,
        heads=shape.heads,
        head_dim=shape.head_dim,
        kv_heads=shape.kv_heads,
        theta=ROPE_THETA,
        context=shape.max_positions,
        vocab=shape.vocab,
        files=corpus["files"],
        megabytes=corpus["bytes"] / 1e6,
        held_out=", ".join(f"`{module}`" for module in HELD_OUT),
        hardware=training["hardware"],
        minutes=training["elapsed_s"] / 60,
        steps=training["step"],
        step_tokens=STEP_TOKENS,
        tokens_m=training["tokens"] / 1e6,
        pass_m=corpus["tokens"] / 1e6,
        loss=training["loss"],
        lengths=", ".join(str(length) for _, length in LENGTHS),
        growth_at=GROWTH_AT,
        decay_share=DECAY_SHARE,
        endings_at=ENDINGS_AT,
        ending_weight=ENDING_WEIGHT,
        loops_at=LOOPS_AT,
        loops_every=LOOPS_EVERY,
        note=f" {training['note']}" if training["note"] else "",
        muon_lr=training["muon_lr"],
        adam_lr=training["adam_lr"],
        held_bytes=compression["bytes"],
        model_bpb=compression["model_bits_per_byte"],
        xz_all=compression["xz_bits_per_byte_of_all_in_one"],
        xz_each=compression["xz_bits_per_byte_each_alone"],
        modules=modules,
        by_position=by_position,
        parsed=completions["parsed"],
        headers=completions["headers"],
        limit=completions["limit_tokens"],
        functions=functions,
    )
    return "\n\n".join(map(_wrapped, text.split("\n\n")))


def write_card(kind: str, directory: Path, shape: Shape) -> None:
    """Write ``README.md`` into a model folder that was exported and evaluated."""
    training = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    figures = json.loads((directory / "evaluation.json").read_text(encoding="utf-8"))
    text = model_card(kind, directory.name, shape, training, figures)
    (directory / "README.md").write_text(text, encoding="utf-8")
