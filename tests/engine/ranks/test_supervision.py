"""Who is to blame: the report on ranks in every state, on a clock of the test's own."""

from penstock.engine.ranks.supervision import (
    CONNECT_SECONDS,
    LAST_WORDS,
    LEAST_SILENCE,
    LONGEST_LOOK,
    SILENCE,
    Rank,
    Supervision,
)
from penstock.engine.ranks.wire import Beat, RankFailed

TICK = 0.1


class Watched:
    """Ranks that beat ten times a second unless they are named in `quiet`."""

    def __init__(self, world: int = 3, step_deadline: float = 100.0, *, loaded: bool = True) -> None:
        self.time = 1000.0
        self.ranks = [Rank(f"rank {i}", greeted=True, loaded=loaded) for i in range(world)]
        self.supervision = Supervision(self.ranks, step_deadline, lambda: self.time)
        self.quiet: set[int] = set()
        for i in range(world):
            self.does(i, 4, "waiting for a plan")

    def does(self, rank: int, plans: int, doing: str, *, waits: bool = False) -> None:
        self.ranks[rank].beat = Beat(rank, plans, doing, "models.decoder:8 in forward", waits)

    def run(self, seconds: float) -> str:
        """The first report within so long."""
        for _ in range(round(seconds / TICK)):
            if report := self.look(TICK):
                return report
        return ""

    def look(self, seconds: float) -> str:
        self.time += seconds
        self.supervision.advance()
        for i, rank in enumerate(self.ranks):
            if i not in self.quiet:
                self.supervision.hear(rank)
        return self.supervision.look()


def failed(reason: str, *, waits: bool = False, for_user: bool = False) -> RankFailed:
    return RankFailed("plan 5", reason, for_user, waits)


def test_all_is_well_while_all_beat_and_results_come() -> None:
    watched = Watched(step_deadline=1.0)
    for _ in range(20):
        watched.supervision.expect(1)
        assert watched.run(0.7) == ""
    watched.supervision.expect(0)
    assert watched.run(5) == ""


def test_who_dies_is_reported_with_its_last_words() -> None:
    watched = Watched()
    watched.does(1, 4, "plan 5")
    watched.ranks[1].ended = "was killed by SIGKILL"
    assert watched.look(0.0) == ""
    assert watched.supervision.troubled
    report = watched.run(LAST_WORDS + TICK)
    assert report == "rank 1 was killed by SIGKILL; last known of it: plan 5, models.decoder:8 in forward"


def test_who_died_goes_before_those_whom_that_made_fail() -> None:
    watched = Watched()
    watched.ranks[0].failed = failed("connection closed by peer", waits=True)
    watched.ranks[2].failed = failed("connection closed by peer", waits=True)
    assert watched.look(0.0) == ""
    watched.ranks[1].ended = "was killed by SIGKILL"
    assert watched.look(0.0).startswith("rank 1 was killed")  # nobody is left to be waited for


def test_who_failed_by_itself_goes_before_those_who_waited_for_it() -> None:
    watched = Watched()
    watched.ranks[0].failed = failed("connection closed by peer", waits=True)
    watched.ranks[2].failed = failed("RuntimeError: the device has burnt out")
    assert watched.run(1.0) == "rank 2 failed in plan 5: RuntimeError: the device has burnt out"


def test_where_all_that_failed_were_waiting_the_others_are_told_of() -> None:
    watched = Watched()
    watched.does(1, 4, "plan 5")
    watched.ranks[0].failed = failed("timed out", waits=True)
    report = watched.run(1.0).splitlines()
    assert report[0] == "rank 0 failed in plan 5: timed out"
    assert report[1] == "rank 1 was in plan 5, models.decoder:8 in forward"


def test_a_users_mistake_is_told_as_it_is_but_only_while_loading() -> None:
    loading = Watched(loaded=False)
    loading.ranks[1].failed = failed("there is no such file", for_user=True)
    loading.ranks[2].failed = failed("RuntimeError: nobody came", waits=True)
    assert loading.run(1.0) == "there is no such file"
    running = Watched()
    running.ranks[1].failed = failed("connection reset", for_user=True)
    assert running.run(1.0).startswith("rank 1 failed in plan 5: connection reset")


def test_who_falls_silent_is_reported() -> None:
    watched = Watched()
    watched.quiet = {2}
    watched.does(2, 4, "plan 5")
    assert watched.run(SILENCE - 2 * TICK) == ""
    assert watched.run(1.0).startswith(f"rank 2 has not been heard of for {SILENCE:g} s")


def test_a_short_deadline_shortens_the_patience() -> None:
    watched = Watched(step_deadline=2.0)
    watched.quiet = {0}
    assert watched.run(0.8) == ""
    assert watched.run(0.4).startswith("rank 0 has not been heard of for 1 s")


def test_while_loading_silence_is_borne_longer() -> None:
    watched = Watched(loaded=False)
    watched.quiet = {0, 1, 2}
    assert watched.run(3 * SILENCE) == ""
    assert len(watched.run(100).splitlines()) == 3


def test_who_never_connects_is_reported() -> None:
    watched = Watched(loaded=False)
    watched.ranks[1].greeted = False
    watched.quiet = {1}
    assert watched.run(CONNECT_SECONDS + 1) == f"rank 1 did not connect within {CONNECT_SECONDS:g} s"


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    watched = Watched()
    watched.quiet = {0}
    watched.supervision.expect(1)
    for _ in range(int(SILENCE / LONGEST_LOOK) - 1):
        assert watched.look(3600.0) == ""
    assert watched.look(3600.0)


def test_who_is_stuck_is_reported_before_those_that_wait() -> None:
    watched = Watched(step_deadline=10.0)
    watched.supervision.expect(2)
    watched.does(0, 4, "plan 5", waits=True)
    watched.does(1, 4, "plan 5")
    watched.does(2, 5, "waiting for a plan")
    assert watched.run(7.8) == ""
    first, *others = watched.run(1.0).splitlines()
    assert first.startswith("rank 1 is stuck: no step for 8 s (80% of step_deadline); it is in plan 5")
    assert [line.split(" is in ")[0] for line in others] == ["rank 0", "rank 2"]


def test_ranks_that_wait_for_each_other_are_reported_together() -> None:
    watched = Watched(step_deadline=10.0)
    watched.supervision.expect(1)
    for rank in range(3):
        watched.does(rank, 4, "plan 5", waits=True)
    report = watched.run(9.0)
    assert report.startswith("the ranks wait for each other: no step for 8 s")
    assert len(report.splitlines()) == 4


def test_every_result_restarts_the_clock() -> None:
    watched = Watched(step_deadline=10.0)
    for _ in range(5):
        watched.supervision.expect(2)
        assert watched.run(7.5) == ""


def test_no_deadline_makes_who_beats_as_it_should_a_silent_one() -> None:
    watched = Watched(step_deadline=0.2)
    watched.quiet = {0}
    assert watched.run(LEAST_SILENCE - 2 * TICK) == ""
    assert watched.run(3 * TICK).startswith(f"rank 0 has not been heard of for {LEAST_SILENCE:g} s")
