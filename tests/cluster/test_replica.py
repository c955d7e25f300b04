"""What a front knows of one engine, from the engine's statistics and what the front itself has sent there."""

from types import SimpleNamespace

from penstock.cluster.moving import StreamPart
from penstock.cluster.replica import STATS_SECONDS, Replica
from penstock.messages import EngineState, EngineStats, GenerateRequest, SamplingParams, Stream


class StandIn:
    """An engine of which only the statistics change."""

    failure = ""

    def __init__(self) -> None:
        self.now = EngineStats()
        self.state = EngineState("ready", 0)
        identity = SimpleNamespace(fingerprint="", weights="")
        limits = {"max_num_seqs": 8, "max_model_len": 1000, "max_step_tokens": 64, "block_size": 16}
        self.info = SimpleNamespace(
            incarnation=1, identity=identity, role="alone", region="", num_blocks=[100], page_port=0, **limits
        )

    def stats(self) -> EngineStats:
        return self.now

    def round_trip(self) -> float:
        return 0.0


def sent(replica: Replica, name: str, cached: int, now: float, tokens: int = 640) -> StreamPart:
    sampling = SamplingParams(seed=0, max_tokens=8)
    request = GenerateRequest(request_id=name, prompt_ids=tuple(range(tokens)), sampling=sampling)
    part = StreamPart(None, replica, Stream(request), tokens, tokens - cached, now)
    replica.sent(part, now)
    return part


def test_what_is_cached_of_an_own_prompt_does_not_wait() -> None:
    """An engine counts whole prompts that wait. One that is cached begins at once, so it delays nobody."""
    engine = StandIn()
    replica = Replica("one", engine, 0.0)
    replica.view(0.0)
    part = sent(replica, "a", 624, 1.0)
    engine.now = EngineStats(waiting=1, waiting_tokens=640)
    view = replica.view(1.02)
    assert view.backlog_tokens + view.booked_tokens == 16
    view = replica.view(1.02 + 2 * STATS_SECONDS)
    assert view.backlog_tokens + view.booked_tokens == 16

    part.stream.begun = part.answered = True
    replica.answered(part)
    assert replica.view(1.2).backlog_tokens == 0, "the statistics are older than its first token"
    engine.now = EngineStats(waiting=1, waiting_tokens=640)
    assert replica.view(1.25).backlog_tokens == 0, "it may have begun after them"
    engine.now = EngineStats(waiting=1, waiting_tokens=640)
    assert replica.view(1.3).backlog_tokens == 640, "another front's"


def test_prompts_of_other_fronts_wait_beside_the_own_ones() -> None:
    engine = StandIn()
    replica = Replica("one", engine, 0.0)
    replica.view(0.0)
    sent(replica, "a", 0, 1.0)
    for at, own in ((1.02, (0, 640)), (3.0, (640, 0))):  # it is booked until the statistics are sure to have it
        engine.now = EngineStats(waiting=2, waiting_tokens=640 + 500)
        view = replica.view(at)
        assert (view.backlog_tokens, view.booked_tokens) == (500 + own[0], own[1])


def test_what_is_probably_computed_of_a_prompt_does_not_wait() -> None:
    """Statistics come after a step, so a front that knows the rate counts the time since the prompt was begun."""
    engine = StandIn()
    engine.info.max_step_tokens = 1024
    replica = Replica("one", engine, 0.0)
    part = sent(replica, "a", 0, 1.0)
    replica.begun(part, 1.0)
    assert waiting(replica, 1.4) == 640, "no rate is known yet"
    for steps in range(1, 9):
        engine.now = EngineStats(steps=steps, step_seconds=0.4 * steps, computed_tokens=400 * steps)
        replica.view(1.4 + 0.01 * steps)
    replica.begun(part, 2.0)
    computed = int(0.2 / replica.view(2.2).prefill_seconds)
    assert 200 < computed < 400
    assert waiting(replica, 2.2) == 640 - computed
    engine.info.max_step_tokens = 512
    assert waiting(replica, 2.2) == 640, "a prompt of several steps counts whole"
    engine.info.max_step_tokens = 1024
    behind = sent(replica, "b", 0, 2.2)
    assert waiting(replica, 2.2) == 640 - computed + 640
    assert waiting(replica, 60.0) == 160 + 640, "it has not ended, and the one behind it has not begun"

    part.answered = True
    replica.answered(part)
    assert waiting(replica, 60.0) == 640
    replica.begun(behind, 60.0)
    assert 160 < waiting(replica, 60.1) < 640
    replica.left(behind)
    replica.answered(behind)
    assert waiting(replica, 60.2) == 0


def waiting(replica: Replica, now: float) -> int:
    view = replica.view(now)
    return view.backlog_tokens + view.booked_tokens
