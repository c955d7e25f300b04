"""The scheduler's state of a request and of each of its choices."""

from enum import Enum

from penstock.messages import ComputeUsage, FinishReason, GenerateRequest, RequestTiming, Work, row_size
from penstock.schedule.drafts.drafter import Drafter


class Phase(Enum):
    HELD_BACK = "held back"  # a further choice, until the first has computed the prompt they share
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Request:
    """A request with choices yet to finish."""

    __slots__ = ("arrival", "cached_tokens", "choices", "held_back", "message", "root", "started")

    def __init__(self, message: GenerateRequest, arrival: float, root: bytes) -> None:
        self.message = message
        self.arrival = arrival
        self.root = root  # of its prefix keys
        self.started = False
        self.cached_tokens = 0
        self.choices: dict[int, Sequence] = {}
        self.held_back: list[Sequence] = []


class SequenceUsage:
    """What a sequence has used of the engine so far, see ComputeUsage."""

    __slots__ = ("block_seconds", "computed", "reached", "rejected", "repeated", "seconds")

    def __init__(self) -> None:
        self.computed = self.repeated = self.rejected = 0  # tokens
        self.reached = 0  # the most tokens that were computed, also before a preemption
        self.seconds = self.block_seconds = 0.0

    def message(self) -> ComputeUsage:
        return ComputeUsage(self.computed, self.repeated, self.rejected, self.seconds, self.block_seconds)


class Sequence:
    """One choice.

    Three counts of tokens matter. `computed`: KV confirmed by results. `planned`: what `computed` will be when all
    outstanding work has succeeded and every draft was accepted. `expected`: how many tokens will be known then, so
    expected - planned tokens are left to compute, and 1 means decoding. Blocks are reserved for `planned`, the most; a
    result with refused drafts lowers both counts, also those of plans still outstanding. Without outstanding work
    planned == computed and expected == len(tokens).
    """

    __slots__ = (
        "choice",
        "computed",
        "dead",
        "decode",
        "drafter",
        "expected",
        "first_token",
        "id",
        "keeps_order",
        "keys",
        "last_token",
        "lead",
        "limit",
        "min_length",
        "next_fill",
        "num_prompt",
        "order",
        "phase",
        "plain_below",
        "planned",
        "preemptions",
        "request",
        "request_id",
        "rows",
        "slots",
        "started",
        "stops",
        "tables",
        "tokens",
        "usage",
    )

    def __init__(self, id: int, request: Request, choice: int, max_model_len: int) -> None:
        message = request.message
        sampling = message.sampling
        self.id = id
        self.request = request
        self.request_id = message.request_id
        self.choice = choice
        self.order: tuple[float, ...] = ()  # the policy's sort key, then `id`: see policy.py
        self.keeps_order = False  # `order` is final
        self.phase = Phase.HELD_BACK
        self.tokens = [*message.prompt_ids, *message.output_ids]
        self.num_prompt = len(message.prompt_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, max_model_len)  # tokens it may have
        if message.pooling is not None:
            self.limit = self.num_prompt + 1  # so that all of the prompt is computed, and nothing after it
        self.stops = sampling.stops()
        self.min_length = self.num_prompt + sampling.min_tokens  # a token that stops comes after so many
        self.keys: list[bytes] = []
        self.decode = Work(id, 1, True)
        self.lead = 0.0  # seconds that steps with drafts, its own and those of others, have saved it
        self.drafter: Drafter | None = None  # made at the first look for drafts
        self.rows = bytearray() if choice == 0 and sampling.prompt_logprobs is not None else None
        self.started = self.first_token = self.last_token = -1.0
        self.preemptions = 0
        self.usage: SequenceUsage | None = None  # None: it is not measured
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """Nothing is computed and no block is held."""
        self.computed = self.planned = 0
        self.expected = len(self.tokens)
        self.tables: list[list[int]] = []  # per group, one id for every block index below slots / block size
        self.dead: list[int] = []  # per group: leading blocks already given back, null in the table
        self.slots = 0  # tokens the tables have room for
        self.next_fill = 0  # `computed` at which the next block is full
        # A decode step's token is appended to fewer `tokens` than this, unless it is a stop token. 0: all but the last
        # of the tokens are not computed yet.
        self.plain_below = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def target(self) -> int:
        """The limit of `planned`: a last token is computed only when another is sampled after it."""
        return self.expected if self.expected < self.limit else self.expected - 1

    @property
    def wants_rows(self) -> bool:
        """Prompt logprobs are requested and not complete: every position of the prompt has to be computed."""
        return self.rows is not None and len(self.rows) < (self.num_prompt - 1) * self._row_size

    def ended_before(self) -> FinishReason | None:
        """Why there is nothing to do at all: a request from the middle can bring its last token with it."""
        if self.num_output and len(self.tokens) > self.min_length and self.tokens[-1] in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.limit and not self.wants_rows else None

    def add_rows(self, data: bytes) -> None:
        """Take the rows of a unit of work that began at `computed`, which gives prompt token computed + 1 first.

        A recomputed part brings rows a second time; those are left out.
        """
        if self.rows is not None:
            self.rows += data[max(0, len(self.rows) - self.computed * self._row_size) :]

    def timing(self, now: float) -> RequestTiming:
        usage = None if self.usage is None else self.usage.message()
        if self.started < 0:
            return RequestTiming(queued=now - self.request.arrival)
        queued = self.started - self.request.arrival
        if self.first_token < 0:
            return RequestTiming(queued, now - self.started, 0.0, self.preemptions, usage=usage)
        prefill, decode = self.first_token - self.started, self.last_token - self.first_token
        drafter = self.drafter
        if drafter is None:
            return RequestTiming(queued, prefill, decode, self.preemptions, usage=usage)
        accepted, rejected = drafter.accepted_prediction, drafter.rejected_prediction
        return RequestTiming(queued, prefill, decode, self.preemptions, accepted, rejected, usage)

    @property
    def _row_size(self) -> int:
        return row_size(self.request.message.sampling.prompt_logprobs or 0)
