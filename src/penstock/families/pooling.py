"""How the files of sentence-transformers in a model's folder say that its texts become vectors.

`modules.json` lists the modules: the model, Pooling, and perhaps Normalize. Others change the vectors and are refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.config.facts import PoolingFacts
from penstock.families.hf_config import HFConfig, UnsupportedModel
from penstock.families.spec import ModelSpec
from penstock.gguf.json_file import parse_json_object, read_json_object

MAX_BYTES = 4 << 20
MAX_PROMPTS = 256
MAX_PROMPT_CHARS = 4096
_MODULES = ("Transformer", "Pooling", "Normalize")
Mode = Literal["cls", "mean", "last", "max"]
_MODES: dict[str, Mode] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "max": "max"}
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def with_pooling(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with what the files of sentence-transformers in `folder` say, if there are any.

    Raises UnsupportedModel for a module, a pooling or a value that is not supported, and ValueError for broken JSON.
    """
    modules = folder / "modules.json"
    if (spec.pooling is not None and spec.pooling.task == "classify") or not modules.is_file():
        return spec
    names = _modules(modules)
    if "Pooling" not in names:
        raise UnsupportedModel("modules.json has no Pooling module; supported: Transformer, Pooling and Normalize")
    transformer = _section(folder / names["Transformer"] / "sentence_bert_config.json")
    longest = transformer.integer("max_seq_length", spec.max_position)
    pooling = PoolingFacts(
        task="embed",
        mode=_mode(_section(folder / names["Pooling"] / "config.json")),
        width=spec.hidden_size,
        encoder=spec.encoder is not None,
        normalize="Normalize" in names,
        **_prompts(_section(folder / "config_sentence_transformers.json")),
    )
    if spec.encoder is None:
        spec = _without_head(spec)
    return replace(spec, pooling=pooling, max_position=min(longest, spec.max_position))


def _without_head(spec: ModelSpec) -> ModelSpec:
    """A decoder that computes no logits."""
    return replace(
        spec,
        parameters=tuple(parameter for parameter in spec.parameters if parameter.name != "head.weight"),
        tie_embeddings=True,
        duplicates=(),
        ignored_tensors=(*spec.ignored_tensors, "lm_head.weight"),
    )


def _modules(path: Path) -> dict[str, str]:
    """The folder of each module, by the name of its class."""
    if path.stat().st_size > MAX_BYTES:
        raise UnsupportedModel(f"modules.json has more than {MAX_BYTES} bytes")
    listed = parse_json_object(b'{"modules": %b}' % path.read_bytes(), "modules.json")["modules"]
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise UnsupportedModel("modules.json is not a list of modules")
    found: dict[str, str] = {}
    for module in map(HFConfig, listed):
        name, where = module.text("type").rpartition(".")[2], module.text("path", "")
        if name not in _MODULES or name in found:
            raise UnsupportedModel(
                f"modules.json has the module {name!r}; supported: one each of {', '.join(_MODULES)}"
            )
        if Path(where).is_absolute() or ".." in Path(where).parts:
            raise UnsupportedModel(f"modules.json has the path {where!r}, which is outside the model's folder")
        found[name] = where
    if list(found) != [name for name in _MODULES if name in found] or "Transformer" not in found:
        supported = ", ".join(_MODULES)
        raise UnsupportedModel(f"modules.json lists {', '.join(found)}; supported: {supported}, in this order")
    return found


def _section(path: Path) -> HFConfig:
    return HFConfig(read_json_object(path, max_bytes=MAX_BYTES) if path.is_file() else {}, path.name)


def _mode(config: HFConfig) -> Mode:
    if not config.flag("include_prompt", True):
        raise config.unsupported("include_prompt", False, "true: the prompt's tokens are pooled too")
    mode = config.get("pooling_mode")
    if mode is None:
        active = [name for field, name in _LEGACY.items() if config.flag(field)]
        mode = active[0] if len(active) == 1 else active or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        (mode,) = mode
    if not isinstance(mode, str) or mode not in _MODES:
        raise config.unsupported("pooling_mode", mode, ", ".join(_MODES))
    return _MODES[mode]


def _prompts(config: HFConfig) -> dict[str, Any]:
    section = config.section("prompts")
    prompts = {} if section is None else {name: section.text(name, "") for name in section.names()}
    longest = max(map(len, prompts.values()), default=0)
    if len(prompts) > MAX_PROMPTS or longest > MAX_PROMPT_CHARS:
        raise config.unsupported(
            "prompts",
            f"with {len(prompts)} prompts of at most {longest} characters",
            f"at most {MAX_PROMPTS} of {MAX_PROMPT_CHARS}",
        )
    default = config.text("default_prompt_name", "")
    if default and default not in prompts:
        raise config.unsupported("default_prompt_name", default, f"one of {', '.join(prompts) or 'no prompts'}")
    return {"prompts": prompts, "default_prompt": default}
