"""The one place that decides whether an engine can verify speculative tokens."""

from collections.abc import Mapping
from typing import Any

from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError
from penstock.config.split import Split


def cannot_speculate(device: str, split: Split, facts: ModelFacts) -> str | None:
    """Why an engine cannot verify speculative tokens; None if it can."""
    transformers = facts.transformers
    if transformers:
        return f"transformers' code executes {transformers}, and its products round by their number of rows"
    if facts.state_elements:
        return "a refused token could not be taken back out of a sequence's states"
    if device == "cuda":
        return "a GPU's next step is planned before the tokens are known that drafts would follow"
    if split.pipeline > 1:
        return "with pipeline stages a step's time is that of several plans, so the cost of drafts cannot be measured"
    return None


def check_speculation(
    values: Mapping[str, Any], sources: Mapping[str, str], device: str, split: Split, facts: ModelFacts
) -> None:
    """Raise ConfigError if the settings name a kind of speculation that this engine does not support."""
    method, source = values["speculation"], sources["speculation"]
    if method != "off" and (reason := cannot_speculate(device, split, facts)) is not None:
        raise ConfigError(
            f"--speculation ({source}) is {method}, but there is none here: {reason}; set --speculation auto or off"
        )
    if method == "off" and values["num_speculative_tokens"]:
        raise ConfigError(
            f"--num-speculative-tokens ({sources['num_speculative_tokens']}) is {values['num_speculative_tokens']}, "
            f"but --speculation ({source}) is off; leave one of the two out"
        )
