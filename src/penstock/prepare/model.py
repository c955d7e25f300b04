"""Turns given settings into a complete configuration: finds the model, reads its config, resolves every setting."""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace as fields_replaced

from penstock.config import (
    ConfigError,
    Given,
    Hardware,
    ModelFacts,
    Resolved,
    ServerConfig,
    Split,
    read_settings,
    resolve,
)
from penstock.config.defaults import Divide
from penstock.config.facts import PoolingFacts
from penstock.config.wrong_setting import COMMAND_LINE
from penstock.families import ModelSpec, load_generation_defaults, load_spec, rank_facts
from penstock.gguf import is_gguf, model_name, read_gguf
from penstock.kernels.native.loader import instruction_sets
from penstock.prepare.checks import check_start
from penstock.prepare.device import detect_device
from penstock.weights.hub import locate_model
from penstock.weights.packaged import EMBEDDED, MINILM, SMOLLM2, embedded_model, locate_default, packaged_model

_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
Flags = Mapping[str, Any]  # settings by their names, as a caller has given them


class AnswerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what answers depend on besides the engine."""

    path: str  # of the model: a folder, or a GGUF file
    server: ServerConfig
    generation: dict[str, float]  # sampling values for requests that do not set them, named as in SamplingParams
    pooling: PoolingFacts | None  # of a model that gives vectors
    family: str
    parameters: int
    quantization: str  # such as Q4_K_M, INT8 or BF16


@dataclass(frozen=True)
class PreparedModel:
    """Holds a model's path and config, and the settings that it will run with."""

    path: Path  # a folder, or a GGUF file
    spec: ModelSpec
    facts: ModelFacts
    resolved: Resolved
    hardware: Hardware
    generation: Mapping[str, float]  # see AnswerSettings

    @property
    def answers(self) -> AnswerSettings:
        """The part that an API process needs."""
        return AnswerSettings(
            path=str(self.path),
            server=self.resolved.server,
            generation=dict(self.generation),
            pooling=self.spec.pooling,
            family=self.spec.family,
            parameters=self.facts.num_parameters,
            quantization=self._quantization,
        )

    def with_engine(self, **changes: Any) -> "PreparedModel":
        """Returns the model with other settings of its engine."""
        engine = fields_replaced(self.resolved.engine, **changes)
        return replace(self, resolved=replace(self.resolved, engine=engine))

    @property
    def _quantization(self) -> str:
        """What most weights are: in the file, or as --quantization makes them."""
        if self.resolved.engine.quantization != "none":
            return self.resolved.engine.quantization.upper()
        if is_gguf(self.path) and (named := read_gguf(self.path).file_type):
            return named
        counts: Counter[str] = Counter()
        for matrix in self.facts.matrices:
            for codes in matrix.stored:
                counts[_FLOATS[self.spec.checkpoint_dtype] if codes is None else codes.name.upper()] += 1
        return counts.most_common(1)[0][0] if counts else _FLOATS[self.spec.checkpoint_dtype]


@dataclass(frozen=True)
class FoundModel:
    """Holds a model's path and config, and the settings that the user gave.

    `divide` gives the facts of each rank for a split.
    """

    path: Path  # a folder, or a GGUF file
    spec: ModelSpec
    divide: Divide
    given: Given

    def changed(self, source: str, **changes: object) -> "FoundModel":
        """Returns a copy with other settings. `source` names where these come from."""
        sources = {**self.given.sources, **dict.fromkeys(changes, source)}
        return replace(self, given=Given(self.given.settings.model_copy(update=changes), sources))

    def resolve(self, hardware: Hardware) -> Resolved:
        """Resolves every setting. Raises ConfigError, CannotSplit and DoesNotFit."""
        packaged = packaged_model(self.path)
        if packaged is not None:
            name = packaged.name
        else:
            name = model_name(self.path) if is_gguf(self.path) else self.path.name
        return resolve(self.given, self.divide, hardware, folder=str(self.path), local_name=name)

    def generation_defaults(self) -> dict[str, float]:
        """Returns the sampling values that the model recommends; none with --generation-config none."""
        if self.given.settings.generation_config == "none":
            return {}
        packaged = packaged_model(self.path)
        return {**(packaged.generation if packaged else {}), **load_generation_defaults(self.path)}


def read_given(model: str | None, flags: Flags, source: str = COMMAND_LINE) -> Given:
    """Returns the settings that the user gave, `model` among them. Raises ConfigError, which says that flags come from
    `source`."""
    settings = dict(flags)
    file = settings.pop("config", None)
    if file == "":
        raise ConfigError("--config is '': name a YAML file, or leave it out")
    path = None if file is None else Path(file)
    return read_settings({**settings, "model": model}, os.environ, path, source)


def find_model(model: str | None, flags: Flags) -> FoundModel:
    """Finds the model and the settings that the user gave. Raises what `read_given` and `find_given` raise."""
    return find_given(read_given(model, flags))


def find_given(given: Given, *, weights: bool = True) -> FoundModel:
    """Finds the model that the settings name.

    A Hugging Face model is downloaded, without the weights if `weights` is false and they are not in GGUF. Raises
    UnsupportedModel, GgufError and HubError.
    """
    named = given.settings.model
    if named is None and given.settings.revision is not None:
        raise ConfigError(
            f"--revision ({given.sources['revision']}) is {given.settings.revision}, but the default model has no "
            "revisions; name a Hugging Face model, or leave it out"
        )
    path = _default_model() if named is None else locate_model(named, given.settings.revision, weights=weights)
    spec = load_spec(path)
    return FoundModel(path, spec, lru_cache(partial(_rank_facts, spec)), given)


def _default_model() -> Path:
    path = locate_default()
    if path == embedded_model():
        print(f"{EMBEDDED} completes Python code. For {SMOLLM2.purpose}, run {SMOLLM2.install}", file=sys.stderr)
    return path


def _rank_facts(spec: ModelSpec, split: Split, group: int = 1) -> tuple[ModelFacts, ...]:
    """Returns what `rank_facts` does, for the native kernels that this machine has."""
    isa = next(iter(instruction_sets()), "")
    return tuple(rank.for_kernels(isa) for rank in rank_facts(spec, split, group))


def prepare(model: str | None, flags: Flags, *, pools: bool = False) -> PreparedModel:
    """Finds the model and resolves every setting. Starts no process and reads only the headers of the weights. The
    model must generate text or, with `pools`, give vectors.

    Raises ConfigError, CannotSplit, DoesNotFit, UnsupportedModel, CheckpointError, GgufError and HubError: ValueErrors
    that say what to change.
    """
    found = find_model(model, flags)
    name = model or found.path.name
    if pools and found.spec.pooling is None:
        raise ConfigError(
            f"{name} generates text and has no embeddings: name an embedding model, such as {MINILM.name}"
        )
    if not pools and found.spec.pooling is not None:
        raise ConfigError(f"{name} gives vectors, not text: use penstock embed or penstock serve")
    return prepare_found(found)


def prepare_found(found: FoundModel, hardware: Hardware | None = None) -> PreparedModel:
    """Does what `prepare` does, for a model that has been found. `hardware` is what it may use; None: this machine."""
    hardware = hardware or detect_device(found.given.settings.device)
    resolved = found.resolve(hardware)
    if hardware.promised and hardware.device == "cpu":  # the engine measures the memory itself
        engine = fields_replaced(resolved.engine, kv_cache_bytes=min(plan.kv_bytes for plan in resolved.ranks))
        resolved = replace(resolved, engine=engine)
    check_start(found, resolved, hardware)
    generation = found.generation_defaults()
    return PreparedModel(found.path, found.spec, found.divide(Split(), 1)[0], resolved, hardware, generation)
