"""benchmarks/speculation_blocks.py finds what speculation gains or costs in an engine whose step times are known."""

import random
from collections.abc import Iterator, Sequence

import pytest
from speculation_blocks import Block, Client, Group, Switch, control, summary

from penstock.engine.core import EngineCore
from penstock.engine.link.wire import Ready
from penstock.messages import (
    EngineInfo,
    EngineStats,
    GenerateRequest,
    SamplingParams,
    StepPlan,
    StepResult,
)
from penstock.schedule import Scheduler, SchedulerConfig
from penstock.schedule.drafts.speculation import Speculation
from tests.plan_checks import VirtualClock
from tests.schedule.known_texts import Cost, KnownTexts, Text
from tests.schedule.test_speculation import copies, noise, tiled

BLOCK = 4


class Executor(KnownTexts):
    """Gives known texts; `result` blocks while the time of a step passes."""

    result_at = 0.0

    def __init__(self, texts: Sequence[Text], limits: SchedulerConfig, cost: Cost, switch: Switch) -> None:
        self.clock = VirtualClock(1.0)
        super().__init__(texts, limits, self.clock, cost)
        self._switch = switch
        self.drafts = {True: 0, False: 0}  # by whether speculation is on

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.drafts[self._switch.on] += sum(work.drafts for work in plan.work)

    def result(self) -> StepResult:
        self.clock.now = self.outstanding[0][0]
        return super().result()


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Switch:
    for name in ("extend", "note"):
        monkeypatch.setattr(Speculation, name, getattr(Speculation, name))  # is restored
    return Switch()


def measured(texts: Sequence[Text], cost: Cost, switch: Switch, batch: int) -> tuple[list[Group], Executor]:
    """The groups of texts that are served `batch` at a time."""
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=512,
        max_model_len=4096,
        enable_prefix_caching=False,
        speculation="suffix",
        num_speculative_tokens=31,
        max_step_drafts=32,
    )
    executor = Executor(texts, config, cost, switch)
    groups: list[Group] = []

    def sets(client: Client, info: EngineInfo) -> Iterator[Sequence[GenerateRequest]]:
        for start in range(0, len(texts), batch):
            yield [
                GenerateRequest(
                    request_id=f"{start}-{i}",
                    prompt_ids=tuple(text.prompt),
                    sampling=SamplingParams(seed=0, max_tokens=len(text.output), temperature=0.0),
                )
                for i, text in enumerate(texts[start : start + batch])
            ]
            groups.extend(client.groups)

    client = Client(switch, BLOCK, sets, executor.clock)
    client.announce(Ready(None, EngineStats()))  # type: ignore[arg-type]  # these sets need no information
    scheduler = Scheduler(config, executor.capacity)
    core = EngineCore(scheduler, executor, client.post, executor.capacity, incarnation=0, clock=executor.clock)
    assert core.run(client) == "all is measured"
    return groups, executor


def test_drafts_are_made_in_the_blocks_with_speculation_alone(switch: Switch) -> None:
    groups, executor = measured(copies(6, random.Random(1)), tiled, switch, 1)
    assert executor.drafts[True] > 100 and not executor.drafts[False]
    assert len(groups) >= 6
    assert all(sum(block.on for block in group) == 2 and len(group) == 4 for group in groups)
    assert all(block.tokens == BLOCK for group in groups for block in group if not block.on)
    assert len({tuple(block.on for block in group) for group in groups}) == 2
    assert summary(groups)["ratio"] > 2


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_that_takes_longer_with_speculation_shows(switch: Switch, batch: int) -> None:
    """By 5%: of every step while speculation is on."""
    texts = noise(4 * batch, random.Random(2))
    groups, _ = measured(
        texts, lambda sequences, rows: tiled(sequences, sequences) * (1.05 if switch.on else 1), switch, batch
    )
    found = summary(groups)
    assert found["ratio"] == pytest.approx(1 / 1.05, abs=1e-3) and found["slower"]
    assert found["ratio"] == found["median"] == found["ratio_interval"][0] == found["ratio_interval"][1]
    assert found["control"] == 1
    assert found["tok_s_off"] == pytest.approx(batch / tiled(batch, batch), rel=1e-3)


def test_a_case_is_slower_only_if_its_interval_says_so() -> None:
    chance = random.Random(3)

    def group(on: float, noise: float) -> Group:
        return [
            Block(each, 10, chance.gauss(1, noise) / (on if each else 1), 0.01) for each in (True, False, False, True)
        ]

    noisy = summary([group(0.95, 0.2) for _ in range(12)])
    steady = summary([group(0.95, 0.02) for _ in range(40)])
    assert not noisy["slower"] and steady["slower"]
    assert steady["ratio_interval"][0] < 0.95 < steady["ratio_interval"][1]
    assert steady["control_interval"][0] < 1 < steady["control_interval"][1]
    assert steady["looking"] == pytest.approx(0.0095, rel=0.02)


def test_the_control_is_made_of_blocks_without_speculation() -> None:
    groups = [[Block(True, 1, 9.0, 0.0), Block(False, 1, 1.0, 0.0), Block(False, 1, 2.0, 0.0)] for _ in range(20)]
    halves = control(groups)
    assert all(sorted(block.seconds for block in half) == [1, 2] for half in halves)
    assert len({half[0].seconds for half in halves}) == 2 and all(half[0].on and not half[1].on for half in halves)
