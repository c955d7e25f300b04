"""Errors for models that Penstock does not run: what the model is, and the nearest way out."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from penstock.gguf.json_file import read_json_object

MAX_CONFIG_BYTES = 4 << 20
EXAMPLE = "Qwen/Qwen3-0.6B"
NAMED = 3  # folders that an error names

# By the end of an architecture's name: what such a model is for.
_KINDS = (
    (r"For(SequenceClassification|TokenClassification|QuestionAnswering|RewardModel)$", "classifies text"),
    (r"ForMaskedLM$", "fills gaps in a text, and embeds it"),
    (r"^(?!.*(For|LMHead)).*Model$", "embeds text"),
    (r"^(T5|MT5|Bart|MBart|Pegasus|LongT5|UMT5|Marian|BlenderBot|M2M100).*For", "reads with an encoder"),
    (r"^Whisper|For(SpeechSeq2Seq|CTC|AudioClassification)$", "transcribes speech"),
    (r"^(CLIP|Siglip|ViT|Dino).*|ForImageClassification$", "sees images"),
)
_GGUF_KINDS = {
    "clip": "the vision part of a multimodal model (mmproj); name the file of its language model",
    "bert": "an encoder, which embeds text",
    "nomic-bert": "an encoder, which embeds text",
    "jina-bert-v2": "an encoder, which embeds text",
    "t5": "an encoder and a decoder",
    "t5encoder": "an encoder, which embeds text",
    "wavtokenizer-dec": "a decoder of sound",
}


def unknown_architecture(
    names: Sequence[str],
    model_type: object,
    supported: Iterable[str],
    encoders: Iterable[str] = (),
    transformers: Callable[[str], str] = lambda architecture: "",
) -> str:
    """Returns the error for the `architectures` of a config.json of which none is supported. `transformers` says of a
    decoder why transformers' code does not execute it."""
    known = sorted(supported)
    listed = f"supported: {', '.join(known)}"
    if not names:
        near = _nearest(f"{model_type}ForCausalLM", known) if isinstance(model_type, str) else ""
        fix = f'; if it is one of {model_type}, add "architectures": ["{near}"]' if near else ""
        return f"no architecture is named{fix}; {listed}"
    name = names[0]
    what = f"architecture {', '.join(map(repr, names))} is not supported"
    kind = next((words for pattern, words in _KINDS if re.search(pattern, name)), "")
    if kind:
        if name.endswith(("Model", "ForMaskedLM", "ForSequenceClassification")) and "text" in kind:
            return f"{what}: such a model {kind}; supported of these: {', '.join(encoders)}"
        return f"{what}: such a model {kind}, and Penstock generates text; use a model of a supported one; {listed}"
    near = _nearest(name, known)
    if why := transformers(name):
        what += f"; {why}"
    if near:
        return f"{what}; the nearest that is supported is {near}: use a model of that family; {listed}"
    return f"{what}; use a model of another family, such as {EXAMPLE}; {listed}"


def unknown_gguf(kind: str, architecture: str, supported: Iterable[str]) -> str:
    """Returns the error for a GGUF file of another kind than "model", or of an unknown architecture."""
    known = list(supported)
    if kind in ("adapter", "imatrix"):
        what = "a LoRA adapter" if kind == "adapter" else "an importance matrix for quantising"
        return f"general.type is {kind!r}: {what}, not a model; name the file of the model itself"
    if kind == "mmproj":
        return f"general.type is 'mmproj': {_GGUF_KINDS['clip']}"
    what = f"general.architecture is {architecture!r}"
    if kind != "model":
        return f"general.type is {kind!r}; only a file of a model can be served"
    if architecture in _GGUF_KINDS:
        rest = "" if "name the file" in _GGUF_KINDS[architecture] else f"; supported: {', '.join(known)}"
        return f"{what}: {_GGUF_KINDS[architecture]}{rest}"
    near = _nearest(architecture, known)
    way = f"the nearest that is supported is {near}" if near else f"use a model of another family, such as {EXAMPLE}"
    return f"{what}, which is not supported; {way}; supported: {', '.join(known)}"


def no_config(folder: Path) -> str:
    """Returns the error for a folder without config.json: what it is instead, and what to do."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    what = f"{folder} is not a model's folder: it has no config.json"
    if "adapter_config.json" in names:
        return f"{folder} is a PEFT adapter, not a model{_base_of(folder)}; merge it into its model (merge_and_unload)"
    if "model_index.json" in names:
        return f"{folder} is a diffusers pipeline, which makes images; Penstock generates text: use a language model"
    if not names:
        return f"{what}; it is empty: download the model into it, or check the path"
    if "params.json" in names or any(name.startswith("consolidated.") for name in names):
        return f"{what}; these are the original files of its maker: use the same model in the Hugging Face layout"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inner:
        return f"{what}, but {_listed([str(folder / name) for name in inner])} has: name that folder"
    if any(name.endswith(".safetensors") for name in names):
        return f"{what}, only weights; download config.json and tokenizer.json of the same model into it"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return f"{what}, only pickles, which can run code and are not read; use a model in safetensors or GGUF"
    return f"{what}; name the folder that has config.json, *.safetensors and tokenizer.json, or a GGUF file"


def _base_of(folder: Path) -> str:
    try:
        config = read_json_object(folder / "adapter_config.json", max_bytes=MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return ""
    base = config.get("base_model_name_or_path")
    return f" (its model is {base[:120]!r})" if isinstance(base, str) and base else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    """Returns the known name that differs least: by its letters before the task and the version."""
    stems = {_stem(one): one for one in reversed(known)}
    close = difflib.get_close_matches(_stem(name), list(stems), n=1, cutoff=0.7)
    return stems[close[0]] if close else ""


def _stem(name: str) -> str:
    return re.sub(r"For[A-Z]\w*$|LMHeadModel$", "", name).lower()


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names[:NAMED]) + (f" (and {len(names) - NAMED} more)" if len(names) > NAMED else "")
