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
    speculation: Literal["off", "ngram", "suffix"] = "off"  # where drafts come from, see schedule/drafts
    num_speculative_tokens: int = 0  # most drafts of one sequence in a step
    max_step_drafts: int = 0  # most drafts in a step
    tenants: bool = False  # share the engine among tenants, and measure what each request uses

    def __post_init__(self) -> None:
        names = ["max_num_seqs", "max_num_batched_tokens", "max_model_len"]
        names += [] if self.speculation == "off" else ["num_speculative_tokens", "max_step_drafts"]
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.target_step_time < float("inf"):
            raise ValueError(f"target_step_time={self.target_step_time}: give seconds, or 0 for none")
        # So that one decode of every running sequence always fits into a step.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than the tokens of a step in which "
                f"max_num_seqs={self.max_num_seqs} sequences decode: raise max_num_batched_tokens to "
                f"{self.max_num_seqs} or lower max_num_seqs"
            )
