"""The settings of a chat: sampling values with their sources, and what the terminal shows."""

from collections.abc import Mapping
from typing import Any

from penstock.config.sizes import without_unit
from penstock.declared.sampling import SAMPLING
from penstock.messages import NEUTRAL, InvalidParameter, SamplingParams, check_sampling

CHAT_TOKENS, RAW_TOKENS = 2048, 256  # a small model may never end an answer, and one that completes text rarely does
# For a model that recommends nothing: to sample from the whole vocabulary reads badly.
UNRECOMMENDED: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
NUMBERS = (*SAMPLING, "seed", "max_tokens")
SWITCHES = ("stats", "markdown", "history")
_MOST_TOKENS = 2**31 - 1


class ChatSettings:
    """Values by name. A value has a source: /set, a flag, the model, or Penstock's default."""

    def __init__(self, recommended: Mapping[str, float], flags: Mapping[str, Any], *, raw: bool = False) -> None:
        """`recommended` are the model's sampling values. `flags` are those given: sampling values and switches.

        Raises ValueError that names the flag whose value is out of range.
        """
        self._default: dict[str, tuple[Any, str]] = {name: (value, "default") for name, value in NEUTRAL.items()}
        self._default |= {"seed": (None, "default"), "max_tokens": (RAW_TOKENS if raw else CHAT_TOKENS, "default")}
        self._default |= {"stats": (False, "default"), "markdown": (not raw, "default"), "history": (True, "default")}
        for name, value in (recommended or UNRECOMMENDED).items():
            self._default[name] = (value, "the model" if recommended else "default")
        for name, value in flags.items():
            if name in NUMBERS:
                _check(name, value, "--" + name.replace("_", "-"))
            self._default[name] = (value, "the command line")
        self._set: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._set[name] if name in self._set else self._default[name][0]

    def set(self, name: str, text: str) -> None:
        """Sets a value as the user types it; "default" takes back what was set. Raises ValueError."""
        if text == "default":
            self._set.pop(name, None)
        elif name in SWITCHES:
            if text not in ("on", "off"):
                raise ValueError(f"{name} is on or off, not {text[:40]!r}")
            self._set[name] = text == "on"
        else:
            self._set[name] = _number(name, text)

    def source(self, name: str) -> str:
        return "/set" if name in self._set else self._default[name][1]

    def shown(self, name: str) -> str:
        value = self[name]
        if name in SWITCHES:
            return "on" if value else "off"
        if value is None:
            return "random"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def sampling_summary(self) -> str:
        """Returns the sampling values that something other than Penstock's neutral values decides, on one line."""
        names = [name for name, neutral in NEUTRAL.items() if self[name] != neutral]
        return ", ".join(f"{name} {self.shown(name)}" for name in names) or "temperature 1"

    def sampling(self, seed: int, left: int, eos: tuple[int, ...]) -> SamplingParams:
        """Returns the parameters of an answer. `seed` is taken if none is set; `left` tokens fit in the context."""
        chosen = self["seed"]
        return SamplingParams(
            **{name: self[name] for name in SAMPLING},
            seed=seed if chosen is None else chosen,
            max_tokens=min(self["max_tokens"], left),
            eos_token_ids=eos,
        )


def _number(name: str, text: str) -> float | int:
    whole = name not in SAMPLING or SAMPLING[name].whole
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        hint = without_unit(text) if whole else ""
        raise ValueError(f"{name} is {text[:40]!r}; it must be {kind}, or default{hint}") from None
    _check(name, value, name)
    return value


def _check(name: str, value: float, label: str) -> None:
    if name == "max_tokens":
        if not 1 <= value <= _MOST_TOKENS:
            raise ValueError(f"{label} is {value}; it must be 1 or more: an answer has at least a token")
        return
    values: dict[str, Any] = {"seed": 0, name: value}
    try:
        check_sampling(SamplingParams(**values, max_tokens=1), 1, 0)
    except InvalidParameter as error:
        raise ValueError(label + str(error).removeprefix(name)) from None
