"""Prompts with a suffix: the model writes what belongs between two texts."""

from penstock.frontend.errors import invalid
from penstock.frontend.requests.prompts import encode_prompt
from penstock.frontend.served import ServedModel
from penstock.text.prompts import EncodeInfill


async def encode_infill(model: ServedModel, prompt: str, suffix: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """The token ids of a prompt whose continuation belongs before `suffix`. Raises APIError 400."""
    if model.tokenizer.infill is None:
        raise invalid(
            f"model {model.name!r} does not support insert, as it has no fill-in-the-middle tokens; leave out suffix",
            "suffix",
            "unsupported_parameter",
        )
    size = len(prompt) + len(suffix)
    question = EncodeInfill(prompt, suffix, add_special_tokens)
    return (await encode_prompt(model, question, size, "prompt and suffix", chars=size)).ids


def infill_ends(model: ServedModel) -> tuple[int, ...]:
    """The token ids that end what is written between two texts."""
    return () if model.tokenizer.infill is None else model.tokenizer.infill.ends
