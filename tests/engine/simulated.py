"""An engine whose executor computes nothing: tokens known beforehand, and every kind of trouble on request."""

import ctypes
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from penstock.cluster.client import FleetClient
from penstock.config.engine import EngineConfig
from penstock.engine.client import StreamingClient
from penstock.engine.inprocess import start_thread
from penstock.engine.link.ipc import spawn
from penstock.engine.link.mux import Mux
from penstock.engine.main import EngineBackend, scheduler_config
from penstock.engine.ranks.local import LocalRanks
from penstock.engine.ranks.sizes import RankSizes
from penstock.engine.ranks.workers import WorkersExecutor
from penstock.engine.shared.hub import Hub
from penstock.engine.shared.hub_link import HubLink
from penstock.messages import (
    Capacity,
    Clock,
    EngineClient,
    Executor,
    GenerateRequest,
    Identity,
    KVGroup,
    MemoryRow,
    StepPlan,
    StepResult,
    StepTiming,
    TokenDelta,
)
from tests.plan_checks import VOCABULARY, SimulatedExecutor
from tests.schedule.simulated import expected_output

RANK = (sys.executable, "-m", "tests.engine.ranks.simulated_rank")
ENGINE = (sys.executable, "-m", "tests.engine.simulated_process")
BAD_SEED = 666  # a row with it fails
FATAL_SEED = 999  # a step with it fails as a whole


class Scenario(msgspec.Struct, frozen=True):
    """How the executor behaves; travels as the config's model."""

    step_seconds: float = 0.0
    stuck_at: int = 0  # the step that takes stuck_seconds
    stuck_seconds: float = 60.0
    holding_the_gil: bool = False  # in that step, as native code might
    refuse: str = ""  # an error of the user's making while loading
    crash: str = ""  # any other
    exit: int = 0  # status to vanish with while loading
    load_seconds: float = 0.0
    fail_at: int = 0  # the step that raises
    depth: int = 1
    blocks: int = 257
    rank: int = -1  # of several, the one that has this trouble
    exact_drafts: bool = True


class WrongCheckpoint(ValueError):
    __module__ = "penstock.weights"


class TroubledExecutor(SimulatedExecutor):
    """The simulated executor within a scenario. `result` blocks for the time of a step, as on a CPU."""

    result_at = 0.0

    def __init__(self, config: EngineConfig) -> None:
        self.scenario = msgspec.json.decode(config.model, type=Scenario)
        capacity = Capacity(
            4,
            (KVGroup(self.scenario.blocks),),
            self.scenario.depth,
            Identity("simulated"),
            VOCABULARY,
            (MemoryRow("weights", 0, "there are none"),),
            exact_drafts=self.scenario.exact_drafts,
        )
        super().__init__(
            capacity,
            scheduler_config(config),
            time.monotonic,
            fails=lambda sampling, choice, length: sampling.seed == BAD_SEED,
        )
        self.steps = 0

    def start(self) -> Capacity:
        time.sleep(self.scenario.load_seconds)
        if self.scenario.refuse:
            raise WrongCheckpoint(self.scenario.refuse)
        if self.scenario.crash:
            raise KeyError(self.scenario.crash)
        if self.scenario.exit:
            sys.exit(self.scenario.exit)
        return super().start()

    def submit(self, plan: StepPlan) -> None:
        if any(new.sampling.seed == FATAL_SEED for new in plan.new):
            raise RuntimeError("the device has fallen off the bus")
        super().submit(plan)

    def result(self) -> StepResult:
        self.steps += 1
        time.sleep(self.scenario.step_seconds)
        if self.steps == self.scenario.fail_at:
            raise RuntimeError("the device has burnt out")
        if self.steps == self.scenario.stuck_at:
            if self.scenario.holding_the_gil:
                ctypes.PyDLL(None).sleep(int(self.scenario.stuck_seconds))
            time.sleep(self.scenario.stuck_seconds)
        timing = StepTiming(self.scenario.step_seconds * 0.75, self.scenario.step_seconds * 0.25)
        return msgspec.structs.replace(super().result(), timing=timing)


def executor(config: EngineConfig) -> Executor:
    """In this process, or with a process for each rank."""
    if config.split.world == 1:
        return TroubledExecutor(config)
    return WorkersExecutor(config, simulated_ranks, simulated_sizes)


def simulated_ranks(config: EngineConfig) -> LocalRanks:
    return LocalRanks(config.split.world, RANK)


def simulated_sizes(config: EngineConfig, memory: Sequence[int]) -> RankSizes:
    return RankSizes((257,), ("everything",) * len(memory))


BACKEND = EngineBackend(executor, lambda config: (7,))


def config(scenario: Scenario | None = None, **fields: object) -> EngineConfig:
    """A small engine."""
    own = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "name": "simulated", **fields}
    return EngineConfig(model=msgspec.json.encode(scenario or Scenario()).decode(), **own)


async def start(
    kind: str, scenario: Scenario | None = None, clock: Clock = time.monotonic, **fields: object
) -> StreamingClient | FleetClient:
    """A client of a simulated engine: on a thread, in a process, in one that is replaced when it ends, in a process
    with others for two ranks, on a thread and shared, or on a thread and in a fleet. `clock` is the client's."""
    if kind == "ranks":
        fields = {"tensor_parallel_size": 2, **fields}
    if kind == "fleet":
        engine = await start_thread(config(scenario, **fields), BACKEND, clock)
        fleet = FleetClient(clock=clock, seed=1)
        fleet.join("only", engine)
        return fleet
    if kind == "shared":
        return await shared(await start_thread(config(scenario, **fields), BACKEND), clock)
    if kind == "thread":
        return await start_thread(config(scenario, **fields), BACKEND, clock)
    return await spawn(config(scenario, **fields), ENGINE, resumes=kind == "resumes", clock=clock)


async def shared(client: StreamingClient, clock: Clock = time.monotonic) -> StreamingClient:
    """The engine of `client` through a hub. To close it closes all."""
    hub = Hub(client)
    one, other = socket.socketpair()
    ends = Mux(one), Mux(other)
    hub.connect(ends[0], client.control)
    engine = await HubLink(ends[1], hub.version, clock).client()
    leave = engine.close

    async def close() -> None:
        await leave()
        hub.close()
        for end in ends:
            end.close()
        await client.close()

    engine.close = close  # type: ignore[method-assign]
    return engine


class Answer:
    """What a request's stream gave, checked on the way: contiguous offsets, nothing after an end."""

    def __init__(self, request: GenerateRequest) -> None:
        self.choices: dict[int, list[int]] = {
            request.first_choice + i: list(request.output_ids) for i in range(request.n)
        }
        self.logprobs: dict[int, bytes] = dict.fromkeys(self.choices, b"")
        self.ends: dict[int, TokenDelta] = {}
        self.deltas: list[TokenDelta] = []

    def take(self, delta: TokenDelta) -> None:
        assert delta.choice not in self.ends, "a delta after the last"
        tokens = self.choices[delta.choice]
        if delta.finish_reason is None:
            assert delta.offset == len(tokens), "tokens are missing or doubled"
        else:
            assert delta.offset <= len(tokens)
            self.ends[delta.choice] = delta
        tokens[delta.offset :] = delta.token_ids
        self.logprobs[delta.choice] += delta.logprobs
        self.deltas.append(delta)

    @property
    def reasons(self) -> dict[int, str | None]:
        return {choice: delta.finish_reason for choice, delta in sorted(self.ends.items())}


async def ask(client: EngineClient, request: GenerateRequest) -> Answer:
    """The whole answer to a request."""
    answer = Answer(request)
    async for delta in client.generate(request):
        answer.take(delta)
    return answer


def expected(request: GenerateRequest, choice: int = 0) -> list[int]:
    """The tokens of a choice, output_ids included, as long as max_tokens and not max_model_len ends it."""
    return expected_output(request, choice, 10**6)[0]
