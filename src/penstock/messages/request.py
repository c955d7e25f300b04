"""A client's request to an engine."""

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Ranges are checked by `check_sampling`.

    Filters apply in the order: logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p.
    `temperature` 0 is greedy. `top_k` 0 is off. Penalties see prompt and output (repetition) or output only (presence,
    frequency), as in the OpenAI API and transformers.
    """

    seed: int  # 0 .. 2**64-1; always fixed before the engine sees it
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    eos_token_ids: tuple[int, ...] = ()  # the model's own; ignored when ignore_eos
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # k best beside the sampled token; None: no logprobs at all
    prompt_logprobs: int | None = None  # k best for every prompt token but the first

    def stops(self) -> frozenset[int]:
        """The token ids that end a choice."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(self.eos_token_ids))


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tokens of a choice may be reasoning: the text from `begin` up to `end`, the markers not counted.

    When they are spent, the engine writes `end`, and then one of `answers`, up to where they differ.
    """

    budget: int
    begin: str
    end: str
    opened: bool = False  # the prompt ends within reasoning
    answers: tuple[str, ...] = ()


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The constraint on the text of a choice, from its first token to its end-of-sequence token.

    `text` is a JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark, and has been checked by
    `text.grammars`. Grammars of the kind "tools" are in Lark and made by the server. With a trigger, output is free
    until its text contains the trigger; the grammar describes what follows it. The kind "any" allows every text, for a
    budget of thinking alone.
    """

    kind: Literal["json_schema", "regex", "lark", "tools", "any"]
    text: str
    trigger: str = ""
    thinking: Thinking | None = None


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests one vector of the whole prompt, instead of tokens. The model decides which: see `PoolingFacts`."""

    second: int = 0  # where the second text of a pair begins in the prompt; 0: there is one text


LATER_PRIORITY = 3600  # of requests that no client waits for: they leave half of the queue to others


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt and what to do with it.

    It can start from the middle: `output_ids` are tokens already produced (for choice `first_choice`, with n = 1), and
    generation goes on after them exactly as if it had never stopped.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    n: int = 1  # choices first_choice .. first_choice + n - 1
    first_choice: int = 0
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None  # the request ends with a vector, which counts as its one token
    cache_salt: str = ""  # prefix cache entries are shared only between equal salts
    tenant: str = ""
    priority: int = 0  # its place in the queue is that of a request which arrived so many seconds later
    model_revision: str = ""
    arrival: float = 0.0  # seconds on the machine's monotonic clock; 0: when the engine receives the request
    deadline: float | None = None  # of the last token, on the same clock
    first_token_deadline: float | None = None  # same clock
    prediction_ids: tuple[int, ...] = ()  # what the output is expected to be, for drafts; it changes no token
