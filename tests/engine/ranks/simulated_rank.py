"""The worker of a rank with the simulated executor: python -m tests.engine.ranks.simulated_rank ENDPOINT RANK"""

import sys

import msgspec

from penstock.config import EngineConfig, RankPlace
from penstock.engine.ranks.wire import Start
from penstock.engine.ranks.worker import work
from penstock.messages import StepPlan, StepResult
from tests.engine.ranks import simulated_mesh
from tests.engine.simulated import Scenario, TroubledExecutor


class SimulatedRunner:
    """Every rank computes everything. Those that do not report hold what they learn against what they know."""

    def __init__(self, config: EngineConfig, place: RankPlace, mesh: simulated_mesh.Mesh) -> None:
        scenario = msgspec.json.decode(config.model, type=Scenario)
        if scenario.rank not in (-1, place.rank):
            scenario = Scenario(step_seconds=scenario.step_seconds, depth=scenario.depth, blocks=scenario.blocks)
        config = msgspec.structs.replace(config, model=msgspec.json.encode(scenario).decode())
        self.place = place
        self.mesh = mesh
        self.executor = TroubledExecutor(config)
        self.capacity = self.executor.start()
        self.unlearned: list[StepResult] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.executor.submit(plan)
        result = self.executor.result()
        self.mesh.meet()
        if self.place.reports:
            return result
        self.unlearned.append(result)
        return None

    def learn(self, result: StepResult) -> None:
        own = self.unlearned.pop(0)
        known = [(r.seq, r.token_ids, r.error) for r in own.results if r.token_ids or r.error]
        if (result.plan_id, [(r.seq, r.token_ids, r.error) for r in result.results]) != (own.plan_id, known):
            raise RuntimeError(f"rank {self.place.rank} learnt {result} and knows {own}")


class BlockingRunner:
    """A SimulatedRunner as a RankRunner: `take` computes the plan, and one plan is submitted at a time."""

    max_outstanding = 1
    ready = True

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._plan = StepPlan(0, ())
        self.capacity = runner.capacity
        self.learn = runner.learn

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def take(self) -> StepResult | None:
        return self._runner.execute(self._plan)


def load(start: Start) -> BlockingRunner:
    place = RankPlace(start.config.split, start.rank)
    return BlockingRunner(SimulatedRunner(start.config, place, simulated_mesh.join(place, start.rendezvous)))


if __name__ == "__main__":
    sys.exit(work(load, simulated_mesh.__name__))
