"""What a step computes, as numbers, and the protocol of what gives its time."""

from typing import NamedTuple, Protocol


class StepLoad(NamedTuple):
    """The numbers on which the time of a step depends. A row is a sequence in the step."""

    decodes: int = 0  # rows that compute one token and sample
    decode_context: int = 0  # tokens of the KV cache that these read
    prompt_tokens: int = 0  # tokens of the other rows
    prompt_pairs: int = 0  # for each of these, the tokens that it attends to
    prompt_context: int = 0  # tokens of the KV cache that the other rows read and write
    sampled: int = 0  # rows that sample

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens


class StepCostModel(Protocol):
    """Gives the time of a step. Pipeline stages work on several steps at a time: the next one starts after 1/stages of
    it."""

    @property
    def stages(self) -> int: ...

    def seconds(self, work: StepLoad) -> float:
        """Returns the seconds from a step's start to its result."""
