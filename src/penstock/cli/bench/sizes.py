"""Prepares a model for a benchmark: with limits that are large enough, and without speculation."""

from typing import NamedTuple

from penstock.cli.options import Flags
from penstock.config import ConfigError
from penstock.families import model_facts
from penstock.prepare.model import FoundModel, PreparedModel, find_model, prepare_found


class BenchSizes(NamedTuple):
    asked_by: str  # the flag that sets the longest sequence: "--cases 1x256/64"
    context: int  # tokens of the longest sequence
    sequences: int  # that run as one batch
    spare: int = 0  # tokens of context to add if the model allows them
    step_tokens: int = 0  # tokens computed in one step; 0: the engine's default


def prepare_sized(model: str | None, flags: Flags, sizes: BenchSizes) -> PreparedModel:
    """Does what `prepare` does, with `sizes` as the default of the limits that the user did not set.

    Raises what `prepare` raises, and ConfigError if a limit of the model or of the user is too small for `sizes`.
    """
    return prepare_found(with_sizes(find_model(model, flags), sizes))


def with_sizes(found: FoundModel, sizes: BenchSizes) -> FoundModel:
    """Returns a copy with `sizes` as the default of the limits that the user did not set, and speculation off.

    The outputs of random prompts repeat themselves, above all with random weights. With drafts, a benchmark would
    measure how well these repetitions are guessed. Raises ConfigError if a limit of the model or of the user is too
    small for `sizes`.
    """
    given, sources = found.given.settings, found.given.sources
    longest = model_facts(found.spec).max_position
    most, limit = longest, f"the model allows {longest}"
    if given.max_model_len is not None:
        most, limit = given.max_model_len, f"--max-model-len ({sources['max_model_len']}) is {given.max_model_len}"
    if sizes.context > most:
        raise ConfigError(
            f"{sizes.asked_by} takes {sizes.context} tokens of context, but {limit}; ask for at most {most}"
        )
    wanted: dict[str, int | str] = {
        "max_model_len": min(sizes.context + sizes.spare, longest),
        "max_num_seqs": sizes.sequences,
        "speculation": "off",
    }
    if sizes.step_tokens:
        budget = given.max_num_batched_tokens
        if budget is not None and sizes.step_tokens > budget:
            raise ConfigError(
                f"{sizes.asked_by} computes {sizes.step_tokens} tokens in a step, but --max-num-batched-tokens "
                f"({sources['max_num_batched_tokens']}) is {budget}; raise it, or ask for at most {budget}"
            )
        wanted["max_num_batched_tokens"] = sizes.step_tokens
    unset = {name: value for name, value in wanted.items() if getattr(given, name) is None}
    return found.changed(f"for {sizes.asked_by}", **unset)
