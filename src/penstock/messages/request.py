"""A client's request to an engine."""

from typing import Literal

import msgspec

from penstock.messages.sampling import SamplingParams


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


class TenantShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's share of an engine. Requests carry it; for each tenant the newest one counts."""

    weight: float = 1.0  # of its service, relative to that of other tenants
    rank: int = 0  # of the request's class: classes with lower ranks come first
    held_back: int = 0  # places in the batch that only classes with lower ranks may take
    max_wait: float = 0.0  # seconds after which a waiting request of the class comes first; 0: no limit
    step_tokens: int = 0  # of the class's prompts in a step, while a class with a lower rank runs; 0: no limit
    kv_share: float = 1.0  # share of the KV blocks beyond which its sequences are preempted first
    input_price: float = 1.0  # of each token of a prompt that is computed
    output_price: float = 2.0  # of each token of output
    step_price: float = 0.0  # of each millisecond of the engine's steps, as measured
    quantum: float = 0.0  # service that a tenant gets before it is another's turn, so that common prefixes stay cached
    claims: bool = True  # a tenant with less to do than its part takes places and blocks of one that is over its part


class PagesAt(msgspec.Struct, frozen=True):
    """Another engine that has KV blocks of a request, or computes them."""

    address: str  # HOST:PORT
    request_id: str  # of the request there that computes them; "": it has them already


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
    share: TenantShare | None = None  # of the tenant; None: tenants are not told apart
    regions: tuple[str, ...] = ()  # of the engines that may get it; (): all
    priority: int = 0  # its place in the queue is that of a request which arrived so many seconds later
    behind: float = 0.0  # seconds that are added as well, so that others come between the prompts of one client request
    # Seconds on the clock of the process that holds the request. A link to a process with another clock converts them.
    arrival: float = 0.0  # 0: when the engine receives the request
    deadline: float | None = None  # of the last token
    first_token_deadline: float | None = None
    pages: PagesAt | None = None  # set by the front of a fleet
    prediction_ids: tuple[int, ...] = ()  # what the output is expected to be, for drafts; it changes no token

    @property
    def queued_tokens(self) -> int:
        """The tokens of its prompt, unless another engine computes them."""
        return 0 if self.pages is not None else len(self.prompt_ids)

    def on_clock(self, ahead: float) -> "GenerateRequest":
        """Return the same request with its times on a clock that is `ahead` seconds ahead."""
        if not self.arrival and self.deadline is None and self.first_token_deadline is None:
            return self
        return msgspec.structs.replace(
            self,
            arrival=self.arrival and self.arrival + ahead,
            deadline=None if self.deadline is None else self.deadline + ahead,
            first_token_deadline=None if self.first_token_deadline is None else self.first_token_deadline + ahead,
        )
