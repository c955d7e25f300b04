"""Arguments of vLLM's `LLM` that Penstock does not need: it does what they ask for without being asked."""

from collections.abc import Mapping
from typing import Any

GPU_ONLY = ("gpu_memory_utilization", "enforce_eager")  # scripts have them everywhere; on a CPU they say nothing
_DECIDED = "the model decides what it gives"
# The values that change nothing here, and why no other is taken.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "convert": (("auto", "none", "embed", "classify"), _DECIDED),
    "disable_log_stats": ((True, False), "the library logs no statistics"),
    "enable_chunked_prefill": ((True, None), "prompts are always computed in chunks"),
    "runner": (("auto", "generate", "pooling"), _DECIDED),
    "task": (
        ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
        _DECIDED,
    ),
    "tokenizer_mode": (("auto",), "the tokenizer is the one in the model's folder"),
    "trust_remote_code": ((False,), "code from a model's folder is never run"),
}


def without_vllms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without vLLM's arguments that Penstock does not need, and without those that are None.

    Raises ValueError that names the argument if its value asks for something that Penstock does not do.
    """
    for name, (values, why) in _TAKEN.items():
        if name in settings and settings[name] not in values:
            raise ValueError(f"argument of LLM: {name} is {settings[name]!r}, but {why}; leave it out")
    return {name: value for name, value in settings.items() if name not in _TAKEN and value is not None}
