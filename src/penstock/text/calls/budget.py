"""Budgets of thinking: finds the markers between which the engine counts tokens, from a model's format of reasoning."""

from typing import Literal

from penstock.messages import Thinking
from penstock.text.calls.formats import ChannelFormat, ReasoningFormat

AnswerKind = Literal["text", "call", "either"]


def thinking_of(
    reasoning: ReasoningFormat | ChannelFormat, prompt_end: str, budget: int, *, answer: AnswerKind = "text"
) -> Thinking:
    """Returns a budget of so many tokens. `prompt_end` is the end of the prompt, which may begin the reasoning.

    In a format with channels, `answer` says which ones may follow. Else a model could go on in the one for analysis.
    """
    answers: tuple[str, ...] = ()
    if isinstance(reasoning, ReasoningFormat):
        begin, end = reasoning.markers
    else:
        start, channel = f"{reasoning.starts[0]}assistant", reasoning.starts[1]
        begin, end = f"{channel}{reasoning.thoughts}{reasoning.message}", reasoning.ends[0]
        text, call = f"{start}{channel}{reasoning.answer}{reasoning.message}", f"{start}{channel}{reasoning.calls}"
        answers = {"text": (text,), "call": (call,), "either": (text, call)}[answer]
    return Thinking(budget, begin, end, prompt_end.rstrip().endswith(begin), answers)
