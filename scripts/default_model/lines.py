"""Where lines and functions begin and end, read off the tokens: a line's end and the indentation after it are one."""

from dataclasses import dataclass

from tokenizers import Tokenizer

NEWLINE, SPACE = "Ċ", "Ġ"  # in the byte-level alphabet


@dataclass(frozen=True)
class Lines:
    """Of each token id: the indentation it leaves a new line at (-1: it begins none), and what its text tells."""

    indents: list[int]
    defines: list[bool]  # the token is `def` or `async`
    continues: list[bool]  # a line that begins with the token continues the line before
    ends_header: list[bool]  # its text ends in a colon

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Lines":
        size = tokenizer.get_vocab_size()
        found = cls([-1] * size, [False] * size, [False] * size, [False] * size)
        for token, index in tokenizer.get_vocab().items():
            if token.startswith(NEWLINE):
                found.indents[index] = token.count(SPACE, token.rindex(NEWLINE))
            found.defines[index] = token in ("def", "async")
            found.continues[index] = token[0] in ")]}"
            found.ends_header[index] = token.endswith(":")
        return found

    def headers(self, ids: list[int]) -> list[tuple[int, int]]:
        """(where the body begins, the indentation of the `def`) of each function."""
        found = []
        indent = -1
        for i in range(1, len(ids)):
            if self.indents[ids[i - 1]] >= 0 and self.defines[ids[i]]:
                indent = self.indents[ids[i - 1]]
            elif indent >= 0 and self.ends_header[ids[i - 1]] and self.indents[ids[i]] > indent:
                found.append((i, indent))
                indent = -1
        return found

    def end(self, ids: list[int], indent: int) -> int:
        """Where the body `ids` of a function defined at `indent` ends: the first line that is not deeper."""
        for i in range(1, len(ids) - 1):
            if 0 <= self.indents[ids[i]] <= indent and not self.continues[ids[i + 1]]:
                return i
        return len(ids)

    def endings(self, ids: list[int]) -> list[int]:
        """Where functions that begin in `ids` end."""
        found = []
        open_at: list[int] = []
        for i in range(len(ids) - 1):
            indent, following = self.indents[ids[i]], ids[i + 1]
            if indent < 0 or self.continues[following]:
                continue
            if open_at and indent <= open_at[-1]:
                found.append(i)
                while open_at and indent <= open_at[-1]:
                    open_at.pop()
            if self.defines[following]:
                open_at.append(indent)
        return found
