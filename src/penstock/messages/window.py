"""Which tokens of its sequence a token sees."""

from typing import TYPE_CHECKING, overload

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Window(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The tokens that a token sees, itself included: the last `tokens` of the sequence, or with 0 all. If `chunked`,
    those of its own chunk: sequences are divided into chunks of `tokens`. False if all tokens are seen."""

    tokens: int = 0
    chunked: bool = False

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __str__(self) -> str:
        if not self:
            return "full attention"
        return f"chunks of {self.tokens}" if self.chunked else f"window {self.tokens}"

    @overload
    def first_seen(self, position: int) -> int: ...

    @overload
    def first_seen(self, position: "NDArray[np.int64]") -> "NDArray[np.int64]": ...

    def first_seen(self, position: "int | NDArray[np.int64]") -> "int | NDArray[np.int64]":
        """The first position that the token at `position` sees."""
        if not self:
            return position * 0
        if self.chunked:
            return position // self.tokens * self.tokens
        first = position - self.tokens + 1
        return first * (first > 0)
