"""Decides whether a model can have speculative tokens, and whether it has them by default."""

from collections.abc import Mapping
from typing import Any

from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError
from penstock.config.split import Split


def cannot_speculate(facts: ModelFacts) -> str | None:
    """Why no engine can verify speculative tokens of a model; None if it can."""
    if facts.pooling is not None:
        return "a model that gives vectors has no tokens to guess"
    transformers = facts.transformers
    if transformers:
        return f"transformers' code executes {transformers}, and its products round by their number of rows"
    if facts.state_elements:
        return "a refused token could not be taken back out of a sequence's states"
    return None


def off_by_default(device: str, split: Split) -> str | None:
    """Returns why speculation is off unless the settings name a method; None if it is on by default."""
    if device == "cuda":
        return "drafts were never measured on a GPU, which would plan no step ahead with them"
    if split.pipeline > 1:
        return "with pipeline stages drafts are verified only while one sequence runs"
    return None


def check_speculation(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts) -> None:
    """Raise ConfigError if the settings name a kind of speculation that the model does not support."""
    method, source = values["speculation"], sources["speculation"]
    if method != "off" and (reason := cannot_speculate(facts)) is not None:
        raise ConfigError(
            f"--speculation ({source}) is {method}, but there is none here: {reason}; set --speculation auto or off"
        )
    if method == "off" and values["num_speculative_tokens"]:
        raise ConfigError(
            f"--num-speculative-tokens ({sources['num_speculative_tokens']}) is {values['num_speculative_tokens']}, "
            f"but --speculation ({source}) is off; leave one of the two out"
        )
