"""Drafts that the scheduler proposes: no token changes, text that repeats gets faster, and no other slower."""

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.messages import Window
from penstock.schedule import EventFile, ReplayMismatch, read_events, replay
from penstock.schedule.log import Applied, Submitted
from tests.schedule.known_texts import Cost, Text, serve
from tests.schedule.simulated import expected_output, request, simulation

VOCABULARY = 5000


def words(count: int, source: random.Random) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


def copies(count: int, source: random.Random) -> list[Text]:
    """Prompts of 300 tokens that are repeated with a token changed here and there."""
    texts = []
    for _ in range(count):
        prompt = words(300, source)
        output = [source.randrange(VOCABULARY) if source.random() < 0.02 else token for token in prompt[20:280]]
        texts.append(Text(prompt, output))
    return texts


def prose(count: int, source: random.Random) -> list[Text]:
    """Outputs in which short sequences of tokens come again, and go on differently each time."""
    phrases = [words(3, source) for _ in range(12)]

    def text(length: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            found += source.choice(phrases) if source.random() < 0.3 else words(2, source)
        return found[:length]

    return [Text(text(80), text(250)) for _ in range(count)]


def noise(count: int, source: random.Random) -> list[Text]:
    return [Text(words(64, source), words(200, source)) for _ in range(count)]


def guesses(count: int, source: random.Random) -> list[Text]:
    """Every three tokens were there before, and the next one is any of six."""

    def text(length: int) -> list[int]:
        return [source.randrange(6) for _ in range(length)]

    return [Text(text(400), text(250)) for _ in range(count)]


def mixture(count: int, source: random.Random) -> list[Text]:
    """One copy among texts that gain nothing."""
    return [(copies if i % 8 == 0 else prose)(1, source)[0] for i in range(count)]


def memory_bound(sequences: int, rows: int) -> float:
    return 0.004 * max(1.0, rows / 16)


def tiled(sequences: int, rows: int) -> float:
    """Each row costs a fifth of a step until 16 rows; the next 16 cost nothing more."""
    return 0.002 * (1 + 0.2 * min(rows, 16) + 0.15 * max(rows - 32, 0)) + (0.0002 if rows > sequences else 0)


def compute_bound(sequences: int, rows: int) -> float:
    return 0.0002 + 0.001 * rows


def misleading(sequences: int, rows: int) -> float:
    """A step with drafts takes as long as twice its rows do without."""
    return 0.002 + 0.0002 * rows * (2 if rows > sequences else 1)


def planned_anew() -> Cost:
    """The first step after one with drafts cannot repeat its plan, which takes half a step longer."""
    drafted = False

    def cost(sequences: int, rows: int) -> float:
        nonlocal drafted
        after_drafts, drafted = drafted, rows > sequences
        return tiled(sequences, rows) + (tiled(sequences, sequences) / 2 if after_drafts and not drafted else 0.0)

    return cost


def disturbed(seed: int) -> Cost:
    """Other programs take a share of the processor now and then."""
    source = random.Random(seed)
    return lambda sequences, rows: tiled(sequences, rows) * (1 + abs(source.gauss(0, 0.3)))


COSTS = {
    "memory-bound": lambda: memory_bound,
    "tiled": lambda: tiled,
    "compute-bound": lambda: compute_bound,
    "misleading": lambda: misleading,
    "planned anew": planned_anew,
    "disturbed": lambda: disturbed(3),
}
MOST_SLOWER = 0.03
Make = Callable[[int, random.Random], list[Text]]


def ratio(texts: Sequence[Text], cost: Callable[[], Cost], batch: int) -> float:
    """How many times faster the texts are with speculation. The tokens are the same."""
    plain = serve(texts, cost(), "off", batch=batch)
    quick = serve(texts, cost(), "suffix", batch=batch)
    assert plain.outputs == quick.outputs == [list(text.output) for text in texts]
    assert plain.stats.drafts == 0
    return plain.seconds / quick.seconds


@pytest.mark.parametrize("name", ["memory-bound", "tiled", "disturbed"])
def test_copies_are_twice_as_fast(name: str) -> None:
    assert ratio(copies(8, random.Random(1)), COSTS[name], 1) > 2


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("make", [prose, noise, guesses, mixture, copies])
@pytest.mark.parametrize("name", COSTS)
def test_nothing_is_slower(name: str, make: Make, batch: int) -> None:
    assert ratio(make(max(2 * batch, 8), random.Random(batch)), COSTS[name], batch) > 1 - MOST_SLOWER


@pytest.mark.parametrize("name", COSTS)
def test_no_text_waits_for_the_drafts_of_another(name: str) -> None:
    """Copies run beside texts that gain nothing: each of these ends when it would have ended, or sooner."""
    texts = mixture(24, random.Random(11))
    plain, quick = (serve(texts, COSTS[name](), method, batch=24) for method in ("off", "suffix"))
    assert all(new < old * (1 + MOST_SLOWER) for old, new in zip(plain.ended, quick.ended, strict=True))


def every_other_ten(tokens: list[int], whole: list[int]) -> tuple[int, ...]:
    """Of each twenty tokens of the text, ten are forced."""
    place = len(tokens) % 20
    return tuple(whole[len(tokens) : len(tokens) + 10 - place]) if place < 10 else ()


@pytest.mark.parametrize("name", ["memory-bound", "tiled", "disturbed"])
def test_what_a_grammar_forces_takes_fewer_steps(name: str) -> None:
    texts = noise(8, random.Random(5))
    plain = serve(texts, COSTS[name](), "off", forced=every_other_ten)
    quick = serve(texts, COSTS[name](), "ngram", forced=every_other_ten)
    assert plain.outputs == quick.outputs == [list(text.output) for text in texts]
    assert plain.stats.drafts == 0
    assert quick.stats.accepted_tokens > 0.8 * quick.stats.draft_tokens > 0
    assert plain.seconds / quick.seconds > 1.4


@pytest.mark.parametrize("name", COSTS)
def test_a_model_that_writes_forced_text_in_other_tokens_is_not_slower(name: str) -> None:
    texts = noise(8, random.Random(6))
    plain = serve(texts, COSTS[name](), "off")
    wrong = serve(texts, COSTS[name](), "ngram", forced=lambda tokens, whole: (VOCABULARY,) * 8)
    assert wrong.outputs == plain.outputs
    assert plain.seconds / wrong.seconds > 1 - MOST_SLOWER


def test_a_machine_that_was_busy_at_first_is_measured_again() -> None:
    """A plain step that was slow must not make steps with drafts look quick for ever."""

    def busy_at_first() -> Cost:
        steps = iter(range(1 << 30))
        return lambda sequences, rows: compute_bound(sequences, rows) * (4 if next(steps) < 30 else 1)

    assert ratio(guesses(8, random.Random(12)), busy_at_first, 1) > 1 - MOST_SLOWER


def test_a_prediction_is_used_and_counted() -> None:
    source = random.Random(2)
    output = words(300, source)
    prediction = [*output[:100], *words(5, source), *output[103:200], *output[203:]]
    texts = [Text(words(30, source), output, prediction)]
    plain, quick = serve(texts, memory_bound, "off"), serve(texts, memory_bound, "ngram")
    assert plain.outputs == quick.outputs
    assert plain.seconds / quick.seconds > 3
    without = serve([Text(*texts[0][:2])], memory_bound, "ngram")
    assert without.stats.accepted_tokens < 10 < 200 < quick.stats.accepted_tokens


def test_a_copy_that_ends_is_soon_followed_again() -> None:
    """Passages of thirty tokens from anywhere in the prompt, with other text between them: what drafts saved pays for a
    look at every step until the next passage, which two tokens find."""
    source = random.Random(3)
    prompt = words(300, source)
    output: list[int] = []
    for _ in range(20):
        start = source.randrange(270)
        output += [*prompt[start : start + 30], *words(source.randrange(8, 30), source)]
    stats = serve([Text(prompt, output)], memory_bound, "ngram").stats
    assert stats.accepted_tokens > 20 * 25


def test_counters_agree() -> None:
    stats = serve(copies(3, random.Random(4)), tiled, "ngram").stats
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert sum(stats.accepted_at) == stats.accepted_tokens
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert len(stats.accepted_at) == 31 and stats.accepted_at[0] <= stats.drafts
    assert stats.prefill_tokens == 3 * 300


def test_outputs_help_later_requests_of_the_same_tenant_alone() -> None:
    source = random.Random(5)
    output = words(200, source)

    def accepted(second: str, method: str) -> int:
        texts = [Text(words(40, source), output, (), "a"), Text(words(40, source), output, (), second)]
        return serve(texts, memory_bound, method).stats.accepted_tokens

    assert accepted("a", "suffix") > 150
    assert accepted("b", "suffix") == 0
    assert accepted("a", "ngram") == 0


def test_drafts_take_no_block_that_a_sequence_needs() -> None:
    """In a pool that is just large enough, drafts cause no preemption."""
    texts = copies(4, random.Random(6))
    blocks = 1 + 4 * -(-560 // 16)
    plain = serve(texts, memory_bound, "off", batch=4, blocks=blocks)
    quick = serve(texts, memory_bound, "suffix", batch=4, blocks=blocks)
    assert plain.outputs == quick.outputs
    assert plain.stats.preemptions == quick.stats.preemptions == 0 < quick.stats.accepted_tokens


def test_drafts_leave_a_block_for_each_running_sequence() -> None:
    drafting: dict[str, Any] = {"speculation": "ngram", "num_speculative_tokens": 8, "max_step_drafts": 24}
    sim = simulation(blocks=37, **drafting)  # the three outputs just fit
    sim.token_seconds = 0.0
    for i in range(3):
        plain = request(f"r{i}", 5, 43)
        sim.add(replace(plain, prediction_ids=tuple(expected_output(plain, 0, 64)[0])))
    left = []  # blocks that are free after a step whose drafts took some
    while sim.scheduler.has_work:
        rows = sim.executor._sequences
        needed = {seq: max(len(row.tables[0]), -(-(row.position + 1) // 4)) for seq, row in rows.items()}
        plan = sim.plan()
        assert plan is not None
        if any(work.drafts and len(rows[work.seq].tables[0]) > needed[work.seq] for work in plan.work):
            stats = sim.scheduler.stats()
            left.append(stats.blocks_total[0] - stats.blocks_held[0] - stats.running)
        sim.apply()
    assert min(left) == 0 and len(left) > 3
    assert sim.scheduler.stats().preemptions == 0
    for name, choice in sim.outputs:
        sim.check_output(name, choice)


def test_preempted_sequences_keep_their_tokens() -> None:
    texts = copies(12, random.Random(7))
    quick = serve(texts, memory_bound, "suffix", batch=6, blocks=90)
    assert quick.stats.preemptions > 0 < quick.stats.accepted_tokens
    assert quick.outputs == [list(text.output) for text in texts]


@pytest.mark.parametrize("late_ids", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (0, Window(6, chunked=True))])
def test_every_draft_has_its_place_in_the_cache(windows: tuple[int | Window, ...], depth: int, late_ids: bool) -> None:
    """The executor compares each slot that a token sees with the tokens it should depend on. Published blocks hold
    accepted tokens alone, else the second request of each prompt would show it."""
    sim = simulation(
        blocks=40,
        windows=windows,
        depth=depth,
        late_ids=late_ids,
        max_num_batched_tokens=24,
        speculation="suffix",
        num_speculative_tokens=5,
        max_step_drafts=12,
    )
    sim.token_seconds = 0.0  # drafts cost nothing
    for i in range(40):
        plain = request(f"r{i}", 5 + i % 20, 30, seed=i % 7, n=1 + i % 2, stop_token_ids=(3, 9), min_tokens=i % 9)
        output, _ = expected_output(plain, 0, 64)
        guessed = tuple(token + (place % 9 == 8) for place, token in enumerate(output))
        sim.plan()  # so that it is outstanding beside the first one of the new request
        sim.add(replace(plain, prediction_ids=guessed))
        for _ in range(
            i % 5 if late_ids and depth == 1 else i % 5 * 25
        ):  # with several plans, only a sequence alone has drafts
            sim.step()
    sim.run()
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)
    stats = sim.scheduler.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 15


def test_in_a_pipeline_a_sequence_has_drafts_while_it_runs_alone() -> None:
    """Steps of two sequences overlap, so their times say nothing: a step alone is measured before one has drafts."""
    how: dict[str, Any] = {"speculation": "ngram", "num_speculative_tokens": 5, "max_step_drafts": 8}
    sim = simulation(depth=2, late_ids=False, blocks=129, max_model_len=256, **how)

    def add(name: str, length: int) -> None:
        plain = request(name, 5, length)
        sim.add(replace(plain, prediction_ids=tuple(expected_output(plain, 0, 256)[0])))

    def drafts() -> list[int]:
        """Of each plan since the last call."""
        plans, sim.plans = sim.plans, []
        return [sum(work.drafts for work in plan.work) for plan in plans]

    add("long", 200)
    for name in ("first", "second"):
        add(name, 30)
        while sim.outputs[name, 0].finish_reason is None:
            sim.step()
        assert len(together := drafts()) > 30 and not any(together)
        for _ in range(6):
            sim.step()
        plain, *alone = drafts()
        assert all(alone) and bool(plain) == (name == "second")
    sim.run()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)


def test_a_replay_plans_the_same_drafts() -> None:
    """From the events alone: the times of plans and results are among them."""
    file = io.BytesIO()
    serve(copies(9, random.Random(8)), disturbed(8), "suffix", batch=3, log=EventFile(file, print))
    events = list(read_events(file.getvalue().splitlines()))
    plans = replay(events)
    assert sum(work.drafts for plan in plans for work in plan.work) > 50
    assert len(plans) == sum(isinstance(event, Submitted) for event in events)


def test_a_replay_notices_other_times() -> None:
    file = io.BytesIO()
    serve(copies(4, random.Random(9)), tiled, "suffix", log=EventFile(file, print))
    events = [
        Applied(event.result, event.now + 0.002 * (i % 5)) if isinstance(event, Applied) else event
        for i, event in enumerate(read_events(file.getvalue().splitlines()))
    ]
    with pytest.raises(ReplayMismatch):
        replay(events)
