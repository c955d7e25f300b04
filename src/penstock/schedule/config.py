"""The limits of a scheduler."""

from typing import Literal

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one scheduler. Raises ValueError when they contradict each other."""

    max_num_seqs: int  # sequences (choices) that the executor holds at a time
    max_num_batched_tokens: int  # tokens computed in one step; a longer prompt is computed in chunks
    max_model_len: int  # prompt and output of one sequence
    enable_prefix_caching: bool = True
    target_step_time: float = 0.0  # seconds that prompt chunks keep a step to while others decode; 0: none
    num_drafts: int = 0  # drafts of a decoding sequence in each step, which the executor proposes
    speculation: Literal["off", "ngram", "suffix"] = "off"  # drafts that the scheduler proposes, see schedule/drafts
    num_speculative_tokens: int = 0  # of these, most of one sequence in a step
    max_step_drafts: int = 0  # of these, most in a step

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.target_step_time < float("inf"):
            raise ValueError(f"target_step_time={self.target_step_time}: give seconds, or 0 for none")
        if self.num_drafts < 0:
            raise ValueError(f"num_drafts={self.num_drafts}: must not be negative")
        if self.speculation != "off":
            self._check_speculation()
        # So that one decode of every running sequence always fits into a step.
        floor = self.max_num_seqs * (1 + self.num_drafts)
        if self.max_num_batched_tokens < floor:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than the {floor} tokens of a step where "
                f"max_num_seqs={self.max_num_seqs} sequences decode with num_drafts={self.num_drafts}: "
                f"raise max_num_batched_tokens to {floor} or lower max_num_seqs"
            )

    def _check_speculation(self) -> None:
        if self.num_drafts:
            raise ValueError(
                f"speculation={self.speculation!r} and num_drafts={self.num_drafts}: leave one of them out"
            )
        for name in ("num_speculative_tokens", "max_step_drafts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: with speculation it must be at least 1")
