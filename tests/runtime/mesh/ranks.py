"""Ranks in separate processes that execute the plans of a real scheduler in this process."""

import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec

from penstock.config import EngineConfig, Split
from penstock.engine.ranks.workers import combine
from penstock.families import load_spec
from penstock.messages import Capacity, StepPlan, StepResult
from tests.models.serving import NUM_BLOCKS
from tests.ports import free_port
from tests.runtime.mesh.rank import Answer, Execute, Load, Take, read, write

ROOT = Path(__file__).parents[3]


class Processes:
    """Rank processes that load and serve one model after another."""

    def __init__(self, count: int) -> None:
        ours, theirs = zip(*(socket.socketpair() for _ in range(count)), strict=True)
        numbers = [each.fileno() for each in theirs]
        command = [sys.executable, "-m", "tests.runtime.mesh.rank", *map(str, numbers)]
        self._process = subprocess.Popen(command, pass_fds=numbers, cwd=ROOT)
        for each in theirs:
            each.close()
        self._sockets = ours
        self._answers = [each.makefile("rb") for each in ours]
        self._orders = [each.makefile("wb") for each in ours]
        self._decoder = msgspec.msgpack.Decoder(Answer)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in (*self._orders, *self._answers, *self._sockets):
            each.close()
        self._process.wait(60)

    def order(self, rank: int, order: Load | Execute | Take) -> None:
        write(self._orders[rank], order)

    def answer(self, rank: int) -> Answer:
        """Returns the answer to the oldest unanswered order. Raises AssertionError with the rank's error."""
        frame = read(self._answers[rank])
        assert frame, f"rank {rank} has ended"
        answer = self._decoder.decode(frame)
        assert not answer.error, f"rank {rank}: {answer.error}"
        return answer

    def load(
        self,
        folder: Path,
        split: Split,
        *,
        native: bool = True,
        share: bool = True,
        device: bool = False,
        **settings: object,
    ) -> "RanksRunner":
        """Loads a tiny model on the first ranks. `share`: they may use shared memory. `device`: the batch is on a
        MirrorDevice."""
        config = EngineConfig(
            model=str(folder),
            name="tiny",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            threads=1,
            tensor_parallel_size=split.tensor,
            pipeline_parallel_size=split.pipeline,
            expert_parallel=split.expert,
            step_deadline=200.0,
            depth=max(split.pipeline, 2 if device and "speculation" not in settings else 1),
            **settings,  # type: ignore[arg-type]
        )
        return RanksRunner(self, config, native, share, device)


class RanksRunner:
    """Executes plans on several ranks, with the interface of one runner."""

    def __init__(self, processes: Processes, config: EngineConfig, native: bool, share: bool, device: bool) -> None:
        self._processes = processes
        self._device = device
        self._places = config.split.places
        self._learned: list[StepResult] = []
        self._outstanding: deque[int] = deque()
        self.traffic = [(0, 0, 0)] * len(self._places)  # of each rank: sum, gather, send
        rendezvous = f"127.0.0.1:{free_port()}"
        blocks = (NUM_BLOCKS,) * len(load_spec(Path(config.model)).windows)
        for place in self._places:
            processes.order(place.rank, Load(config, place.rank, rendezvous, blocks, native, share, device))
        capacities = [processes.answer(place.rank).capacity for place in self._places]
        self.capacity = combine(cast(list[Capacity], capacities), config.split.pipeline)

    def submit(self, plan: StepPlan) -> None:
        order = Execute(plan, tuple(self._learned))
        self._learned.clear()
        for place in self._places:
            self._processes.order(place.rank, order)
        self._outstanding.append(plan.plan_id)

    def result(self) -> StepResult:
        """Returns the result of the oldest submitted plan."""
        results = []
        for place in self._places if self._device else ():
            self._processes.order(place.rank, Take())
        for place in self._places:
            answer = self._processes.answer(place.rank)
            self.traffic[place.rank] = answer.traffic
            if answer.result is not None:
                assert place.reports
                results.append(answer.result)
        (result,) = results
        assert result.plan_id == self._outstanding.popleft()
        self._learned.append(result)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.result()
