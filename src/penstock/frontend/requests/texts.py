"""Encodes the texts of a request for vectors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from penstock.frontend.call import ModelContext
from penstock.frontend.errors import invalid
from penstock.frontend.offload import offload_if_large
from penstock.frontend.requests.prompts import LARGE, encode_prompt
from penstock.text import TextTokens, TokenizerError
from penstock.text.prompts import CHARS_PER_TOKEN, Encoded, EncodePair, PromptEncoder


class _Limits(NamedTuple):
    """How texts are cut, and the parameter that errors name."""

    param: str
    several: bool
    most: int
    cut: int | None
    cut_second: int | None

    def name(self, index: int) -> str:
        return f"{self.param}[{index}]" if self.several else self.param

    def fitting(self, index: int, encoded: Encoded) -> TextTokens:
        """Raises APIError 400 if the text has no tokens, or too many."""
        tokens = TextTokens(encoded.ids, encoded.second, range(*encoded.content))
        try:
            tokens = tokens if self.cut is None else tokens.cut(self.cut, self.cut_second)
        except ValueError as error:
            raise invalid(f"{self.name(index)}: {error}", self.param) from error
        if len(tokens.ids) > self.most:
            raise invalid(
                f"the maximum length is {self.most} tokens, but {self.name(index)} has {len(tokens.ids)}; send shorter "
                "chunks, set truncate_prompt_tokens to -1, or start the server with --truncate-embeddings",
                self.param,
                "context_length_exceeded",
            )
        if not tokens.ids:
            raise invalid(
                f"{self.name(index)} has no tokens; send text that has at least one", self.param, "empty_prompt"
            )
        return tokens


async def encode_texts(
    context: ModelContext,
    texts: Sequence[tuple[str, str | None]],
    param: str,
    *,
    cut: int | None = None,
    cut_second: int | None = None,
    add_special_tokens: bool = True,
) -> list[TextTokens]:
    """The tokens of texts, or of pairs. With `cut` a text, or the second of a pair, is cut to so many tokens in all;
    with `cut_second`, it has at most so many of its own.

    Raises APIError 400, which names the text, for one that is empty, too long, or not valid Unicode.
    """
    model = context.model
    limits = _Limits(param, len(texts) > 1, model.max_model_len, cut, cut_second)
    sizes = [_size(text, second, limits, i) for i, (text, second) in enumerate(texts)]
    chars, limit = sum(sizes), 2 * context.limits.max_body_bytes
    if chars > limit:  # a query is encoded once for each document
        raise invalid(
            f"{len(texts)} texts, each with its query if there is one, have {chars} characters together; the limit is "
            f"{limit}, twice --max-body-size: send fewer, or a shorter query",
            param,
        )
    questions = [EncodePair(text, second, add_special_tokens) for text, second in texts]
    found: list[TextTokens] = []
    for group in _groups(sizes):
        size, first = sum(sizes[group.start : group.stop]), group.start
        if size > LARGE:
            encoded = await encode_prompt(model, questions[first], size, limits.name(first))
            found.append(limits.fitting(first, encoded))
        else:
            found += await offload_if_large(partial(_encode, model.encoder, questions, group, limits), size)
    return found


def _size(text: str, second: str | None, limits: _Limits, index: int) -> int:
    size, most = len(text) + len(second or ""), limits.most
    if not text or second == "":
        raise invalid(f"{limits.name(index)} is empty; send at least one character", limits.param, "empty_prompt")
    if size > CHARS_PER_TOKEN * most:
        raise invalid(
            f"{limits.name(index)} has {size} characters, more than the {CHARS_PER_TOKEN * most} that could fit in "
            f"{most} tokens; shorten it",
            limits.param,
            "context_length_exceeded",
        )
    return size


def _groups(sizes: Sequence[int]) -> Iterator[range]:
    """Indices of texts that are encoded one after the other: together they are not large, or there is one."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > LARGE:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))


def _encode(encoder: PromptEncoder, questions: Sequence[EncodePair], group: range, limits: _Limits) -> list[TextTokens]:
    found = []
    for i in group:
        try:
            found.append(limits.fitting(i, encoder.encode(questions[i])))
        except TokenizerError as error:
            raise invalid(f"{limits.name(i)}: {error}", limits.param) from error
    return found
