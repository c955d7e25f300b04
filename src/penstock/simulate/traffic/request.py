"""Requests of a simulation. Their prompts are runs of equal tokens, so that a long prompt takes little memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from penstock.messages import GenerateRequest, SamplingParams, TenantShare
from penstock.messages.block_keys import packed
from penstock.simulate.clock import NANO

FIRST_TOKEN = 1000  # ids below are left out, as in `bench`: they are often special tokens


class TokenRun(NamedTuple):
    """`length` equal tokens. Prompts that begin with the same runs share a prefix."""

    token: int
    length: int


Runs = tuple[TokenRun, ...]


class TokenIds:
    """Gives token ids that nothing else in a simulation has."""

    def __init__(self) -> None:
        self._last = FIRST_TOKEN

    def take(self) -> int:
        """Returns an id that was never returned before."""
        self._last += 1
        return self._last

    def run(self, count: int) -> Runs:
        """Returns `count` tokens that share no prefix with any others."""
        return (TokenRun(self.take(), count),) if count else ()


@dataclass(slots=True)
class SimulatedRequest:
    """A request before it is sent to a replica. `at` is in nanoseconds. All of its output tokens are `token`."""

    number: int
    at: int
    prompt: Runs
    output: int
    token: int
    traffic: str  # the name of its class of traffic
    model: str = ""  # "": any replica will do
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0  # of the tenant
    regions: tuple[str, ...] = ()  # of the replicas that may get it; (): all
    timeout: float = 0.0  # seconds to the last token; 0: none
    first_token_timeout: float = 0.0
    turn: int = 1  # of its session, from 1
    user: int = 0  # of a closed loop
    apart: bool = False  # another replica than its own has computed its prompt, or does
    awaits: bool = False  # another replica computes its prompt, and its own has not got it yet
    prompt_tokens: int = field(init=False)
    _prompt_ids: tuple[int, ...] = ()  # once they were needed

    def __post_init__(self) -> None:
        self.prompt_tokens = sum([run.length for run in self.prompt])

    @property
    def queued_tokens(self) -> int:
        """The tokens that its replica must compute before it starts."""
        return 0 if self.apart else self.prompt_tokens

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        if not self._prompt_ids:
            self._prompt_ids = expand(self.prompt)
        return self._prompt_ids

    @property
    def packed_prompt(self) -> bytes:
        """The prompt as `BlockKeys.extend_packed` takes it. Equal tokens are packed once."""
        return b"".join([packed((run.token,)) * run.length for run in self.prompt])

    def message(self, sent: int = 0) -> GenerateRequest:
        """Returns the engine's request. `sent` output tokens were sent already, by another replica."""
        arrival = self.at / NANO
        return GenerateRequest(
            request_id=str(self.number),
            prompt_ids=self.prompt_ids,
            sampling=SamplingParams(seed=self.token, max_tokens=self.output, ignore_eos=True),
            output_ids=(self.token,) * sent,
            priority=self.priority,
            tenant=self.tenant,
            share=TenantShare(self.weight) if self.tenant else None,
            arrival=arrival,
            deadline=arrival + self.timeout if self.timeout else None,
            first_token_deadline=arrival + self.first_token_timeout if self.first_token_timeout else None,
        )


def expand(runs: Runs) -> tuple[int, ...]:
    """Returns the token ids of runs."""
    ids: list[int] = []
    for token, count in runs:
        ids += [token] * count
    return tuple(ids)


def runs_of(ids: Iterable[int]) -> Runs:
    """Returns the runs of token ids."""
    return tuple(TokenRun(token, len(list(equal))) for token, equal in groupby(ids))
