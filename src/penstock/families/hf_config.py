"""A Hugging Face config.json, read field by field: an error names the field, its value and what is possible."""

import math
from collections.abc import Mapping
from typing import Any, Final

from penstock.families.spec import Activation
from penstock.gguf import short


class UnsupportedModel(ValueError):
    """This model cannot be executed as its configuration describes it; the message says why and what is supported."""


MAX_INTEGER = 2**31 - 1
_REQUIRED: Final = object()

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


class HFConfig:
    """Typed access to a configuration. A null counts as absent, as it does in transformers."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self._fields = fields
        self._where = where

    def get(self, name: str) -> Any:
        """The raw value; None if it is absent or null."""
        return self._fields.get(name)

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null: in some families that is another thing than absent."""
        return name in self._fields and self._fields[name] is None

    def names(self) -> list[str]:
        return list(self._fields)

    def integer(self, name: str, default: int | object = _REQUIRED, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | object = _REQUIRED, *, or_zero: bool = False) -> float:
        """A positive finite number; with `or_zero`, also zero."""
        value = self._value(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not number or (value == 0 and not or_zero):
            raise self._wrong(name, value, "a number from 0" if or_zero else "a number above 0")
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

    def one_of(self, name: str, *values: str) -> str:
        """The text, by default the first of the values. Raises UnsupportedModel for one that is not among them."""
        value = self.text(name, values[0])
        if value not in values:
            raise self.unsupported(name, value, " or ".join(values))
        return value

    def texts(self, name: str) -> list[str] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many positive finite numbers."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(name, value, f"a list of {count} numbers above 0")
        if not all(isinstance(item, int | float) and 0 < item < math.inf for item in value):
            raise self._wrong(name, value, f"a list of {count} numbers above 0")
        return tuple(float(item) for item in value)

    def integers(self, name: str) -> list[int]:
        """Counts from 0; an empty list if the field is absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_INTEGER for item in value):
            raise self._wrong(name, value, "a list of integers from 0")
        return value

    def section(self, name: str) -> "HFConfig | None":
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

    def renamed(self, **names: str) -> "HFConfig":
        """This configuration with fields by other names: `theirs` becomes `ours` for each `ours="theirs"`."""
        found = {ours: self.get(theirs) for ours, theirs in names.items() if self.get(theirs) is not None}
        return HFConfig({**self._fields, **found}, self._where)

    def without(self, *names: str) -> "HFConfig":
        """This configuration without fields that the family does not have."""
        return HFConfig({name: value for name, value in self._fields.items() if name not in names}, self._where)

    def with_fields(self, **fields: Any) -> "HFConfig":
        """This configuration with fields changed."""
        return HFConfig({**self._fields, **fields}, self._where)

    def with_section(self, name: str, **fields: Any) -> "HFConfig":
        """This configuration with fields of a nested object changed."""
        return HFConfig({**self._fields, name: {**(self.get(name) or {}), **fields}}, self._where)

    def refuse(self, name: str, why: str) -> None:
        """Raise UnsupportedModel if the field is set: it changes the model's output and is not implemented."""
        value = self.get(name)
        if value is not None and value is not False:
            raise self.unsupported(name, value, f"none: {why}")

    def unsupported(self, name: str, value: object, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where}: {name} {short(value)} is not supported; supported: {supported}")

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UnsupportedModel(f"{self._where}: {name} is missing")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._where}: {name} is {short(value)}; expected {expected}")


def text_config(config: HFConfig) -> HFConfig:
    """The configuration of the language model within one that also takes images."""
    text = config.section("text_config")
    if text is None:
        raise config.unsupported("text_config", None, "the text model's configuration")
    return text.inheriting(config, "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")


def activation(config: HFConfig, name: str, default: str, *, gated: bool = True) -> Activation:
    value = config.text(name, default)
    known = [one for one, ours in _ACTIVATIONS.items() if not (gated and ours.startswith("relu"))]
    if value not in known:
        raise config.unsupported(name, value, ", ".join(known))
    return _ACTIVATIONS[value]


def checkpoint_dtype(config: HFConfig) -> str:
    """The dtype the checkpoint was saved in: `dtype`, before transformers 5 `torch_dtype`; float32 without either."""
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.text(name, "float32")
    if value not in _CHECKPOINT_DTYPES:
        raise config.unsupported(name, value, ", ".join(_CHECKPOINT_DTYPES))
    return value


def layer_windows(
    config: HFConfig,
    num_layers: int,
    window: int,
    sliding_by_default: list[bool],
    *,
    kind: str = "sliding_attention",
) -> tuple[int, ...]:
    """Per layer the tokens that a query sees, itself included; 0: all. `layer_types` decides, if it is set: it names
    layers with a window `kind`.

    transformers' mask for sliding_window = w lets query i see keys j with i - w < j <= i: w of them, i included.
    """
    names = {"full_attention": False, kind: True}
    types = config.texts("layer_types")
    if types is None:
        sliding = sliding_by_default
    elif len(types) != num_layers:
        raise config.unsupported("layer_types", f"with {len(types)} entries", f"one for each of {num_layers} layers")
    else:
        for name in types:
            if name not in names:
                raise config.unsupported("layer_types", name, ", ".join(names))
        sliding = [names[name] for name in types]
    if any(sliding) and not window:
        raise config.unsupported("sliding_window", config.get("sliding_window"), "a size, as layers use it")
    return tuple(window if slides else 0 for slides in sliding)
