"""Fill-in-the-middle: the special tokens between which a model takes the text before and after a gap.

The papers: https://arxiv.org/abs/2207.14255, and for the tokens of each family its own model card.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple


class _Form(NamedTuple):
    """The names of a family's tokens. `ends` are tokens after which the middle is complete, besides the model's own."""

    prefix: str
    suffix: str
    middle: str | None  # None: the suffix comes first, and the prefix last
    ends: tuple[str, ...] = ()


_FORMS: Final = (
    _Form(  # Qwen2.5-Coder, CodeGemma
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),  # StarCoder, Granite
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),  # SantaCoder
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    _Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4, CodeGeeX
    _Form("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


class Infill(NamedTuple):
    """The tokens of a model that fills gaps."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]  # the middle is complete at any of these

    def arrange(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Returns a prompt whose continuation belongs between two texts."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_infill(id_of: Callable[[str | None], int | None], named: Callable[[str], str | None]) -> Infill | None:
    """Returns the tokens of a vocabulary, None if it has none. `id_of` gives the id of a token, `named` the text of the
    tokens that a GGUF file's metadata names: fim_pre, fim_suf and fim_mid."""
    forms = list(_FORMS)
    pre, suf, mid = (named(f"fim_{part}_token") for part in ("pre", "suf", "mid"))
    if pre is not None and suf is not None and mid is not None:
        forms.append(_Form(pre, suf, mid))
    for form in forms:
        prefix, suffix, middle = id_of(form.prefix), id_of(form.suffix), id_of(form.middle)
        if prefix is not None and suffix is not None and (middle is None) == (form.middle is None):
            ends = tuple(end for name in form.ends if (end := id_of(name)) is not None)
            return Infill(prefix, suffix, middle, ends)
    return None
