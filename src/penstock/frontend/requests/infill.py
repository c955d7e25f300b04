"""Prompts with a suffix: the model writes what belongs between two texts."""

from functools import partial

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.offload import offload_if_large
from penstock.frontend.requests.prompts import check_length
from penstock.frontend.served import ServedModel
from penstock.text import TokenizerError


async def encode_infill(model: ServedModel, prompt: str, suffix: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """The token ids of a prompt whose continuation belongs before `suffix`. Raises APIError 400."""
    if model.tokenizer.infill is None:
        raise no_infill(model)
    size = len(prompt) + len(suffix)
    check_length(model, size, "prompt and suffix")
    encode = partial(model.tokenizer.encode_infill, prompt, suffix, add_special_tokens=add_special_tokens)
    try:
        return tuple(await offload_if_large(encode, size))
    except TokenizerError as error:
        raise invalid(f"prompt or suffix: {error}", "suffix") from error


def infill_ends(model: ServedModel) -> tuple[int, ...]:
    """The token ids that end what is written between two texts."""
    return () if model.tokenizer.infill is None else model.tokenizer.infill.ends


def no_infill(model: ServedModel) -> APIError:
    """The error for a suffix that the model cannot take."""
    return invalid(
        f"model {model.name!r} does not support insert, as it has no fill-in-the-middle tokens; leave out suffix",
        "suffix",
        "unsupported_parameter",
    )
