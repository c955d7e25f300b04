"""A Hugging Face config.json, read field by field: an error names the field, its value and what is possible."""

import math
from collections.abc import Mapping
from typing import Any, Final

from penstock.families.attention_kinds import RopeSpec
from penstock.families.spec import Activation


class UnsupportedModel(ValueError):
    """This model cannot be executed as its configuration describes it; the message says why and what is supported."""


MAX_INTEGER = 2**31 - 1
_REQUIRED: Final = object()

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


class HFConfig:
    """Typed access to a configuration. A null counts as absent, as it does in transformers."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self._fields = fields
        self._where = where

    def get(self, name: str) -> Any:
        """The raw value; None if it is absent or null."""
        return self._fields.get(name)

    def names(self) -> list[str]:
        """The fields that are there."""
        return list(self._fields)

    def integer(self, name: str, default: int | object = _REQUIRED, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | object = _REQUIRED, *, or_zero: bool = False) -> float:
        """A positive finite number; with `or_zero`, also zero."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(name, value, "a number above 0")
        if value == 0 and not or_zero:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | object = _REQUIRED) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return value

    def integers(self, name: str) -> list[int]:
        """Counts from 0; an empty list if the field is absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in value):
            raise self._wrong(name, value, "a list of integers from 0")
        return value

    def section(self, name: str) -> "HFConfig | None":
        """A nested object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return HFConfig(value, f"{self._where}, {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or several; none if the field is absent."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_INTEGER for item in ids):
            raise self._wrong(name, value, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def inheriting(self, outer: "HFConfig", *names: str) -> "HFConfig":
        """This section, with each field of `names` taken from `outer` if that sets it."""
        return HFConfig({**self._fields, **{n: outer.get(n) for n in names if outer.get(n) is not None}}, self._where)

    def refuse(self, name: str, why: str) -> None:
        """Raise UnsupportedModel if the field is set: it changes the model's output and is not implemented."""
        value = self.get(name)
        if value is not None and value is not False:
            raise self.unsupported(name, value, f"none: {why}")

    def unsupported(self, name: str, value: object, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where}: {name} {_short(value)} is not supported; supported: {supported}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UnsupportedModel(f"{self._where}: {name} is missing")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where}: {name} is {_short(value)}; expected {expected}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def activation(config: HFConfig, name: str, default: str) -> Activation:
    value = config.text(name, default)
    if value not in _ACTIVATIONS:
        raise config.unsupported(name, value, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[value]


def checkpoint_dtype(config: HFConfig) -> str:
    """The dtype the checkpoint was saved in: `dtype`, before transformers 5 `torch_dtype`; float32 without either."""
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.text(name, "float32")
    if value not in _CHECKPOINT_DTYPES:
        raise config.unsupported(name, value, ", ".join(_CHECKPOINT_DTYPES))
    return value


def rope(config: HFConfig) -> RopeSpec:
    """One rope for all layers: `rope_parameters`, before transformers 5 `rope_theta` and `rope_scaling`."""
    parameters = config.section("rope_scaling") or config.section("rope_parameters") or HFConfig({})
    if parameters.get("full_attention") is not None:
        raise config.unsupported("rope_parameters", "one per layer type", "one for all layers of this architecture")
    return rope_of(parameters, config, config.number("rope_theta", 10000.0))


def rope_of(parameters: HFConfig, config: HFConfig, theta: float) -> RopeSpec:
    """The RopeSpec of one set of parameters. `theta` is the default of rope_theta."""
    for holder in (parameters, config):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.unsupported("partial_rotary_factor", holder.get("partial_rotary_factor"), "1.0")
    theta = parameters.number("rope_theta", theta)
    name = "rope_type" if parameters.get("rope_type") is not None else "type"
    kind = parameters.text(name, "default")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=parameters.number("factor"))
    if kind != "llama3":
        raise parameters.unsupported(name, kind, "default, linear, llama3")
    spec = RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_position=parameters.integer(
            "original_max_position_embeddings", config.integer("max_position_embeddings")
        ),
    )
    if spec.high_freq_factor <= spec.low_freq_factor:
        raise parameters.unsupported("high_freq_factor", spec.high_freq_factor, "above low_freq_factor")
    return spec


def layer_windows(config: HFConfig, num_layers: int, window: int, sliding_by_default: list[bool]) -> tuple[int, ...]:
    """Per layer the tokens that a query sees, itself included; 0: all. `layer_types` decides, if it is set.

    transformers' mask for sliding_window = w lets query i see keys j with i - w < j <= i: w of them, i included.
    """
    names = {"full_attention": False, "sliding_attention": True}
    types = config.texts("layer_types")
    if types is None:
        sliding = sliding_by_default
    elif len(types) != num_layers:
        raise config.unsupported("layer_types", f"with {len(types)} entries", f"one for each of {num_layers} layers")
    else:
        for kind in types:
            if kind not in names:
                raise config.unsupported("layer_types", kind, ", ".join(names))
        sliding = [names[kind] for kind in types]
    if any(sliding) and not window:
        raise config.unsupported("sliding_window", config.get("sliding_window"), "a size, as layers use it")
    return tuple(window if slides else 0 for slides in sliding)
