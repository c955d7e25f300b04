"""Several engines as one: sums of their statistics, and the facts that hold for all of them."""

from collections.abc import Sequence
from itertools import zip_longest

from msgspec.structs import replace

from penstock.cluster.replica import Replica
from penstock.messages import ControlAnswer, EngineInfo, EngineStats, ForgottenBlocks, QueueFull


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of counters and gauges."""
    if not stats:
        return EngineStats()
    total = stats[0]
    for more in stats[1:]:
        total = replace(
            total.after(more.ended()),
            running=total.running + more.running,
            waiting=total.waiting + more.waiting,
            waiting_tokens=total.waiting_tokens + more.waiting_tokens,
            disk_blocks=total.disk_blocks + more.disk_blocks,
            disk_bytes=total.disk_bytes + more.disk_bytes,
            blocks_total=_sums(total.blocks_total, more.blocks_total),
            blocks_held=_sums(total.blocks_held, more.blocks_held),
            blocks_cached=_sums(total.blocks_cached, more.blocks_cached),
        )
    return total


def common_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the facts of the first engine, with the length that all of them allow and their places together."""
    return replace(
        infos[0],
        pid=0,  # the engines may be on other machines
        cpu=None,
        max_model_len=min(info.max_model_len for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        num_blocks=_sums(*(info.num_blocks for info in infos)),
    )


def total_answer(answers: Sequence[ControlAnswer]) -> ControlAnswer:
    """Return one answer for those of all engines."""
    forgotten = [answer.blocks for answer in answers if isinstance(answer, ForgottenBlocks)]
    return ForgottenBlocks(_sums(*forgotten)) if forgotten else answers[0]


class FleetQueue:
    """A messages.Queue: the requests that wait in all engines together. One is refused only if every engine would."""

    def __init__(self, replicas: "dict[str, Replica]") -> None:
        self._replicas = replicas
        self._refused = self._late = 0  # here; the engines' clients count their own

    @property
    def tokens(self) -> int:
        return sum(replica.engine.queue.tokens for replica in self._replicas.values())

    @property
    def refused(self) -> int:
        return self._refused

    @refused.setter
    def refused(self, count: int) -> None:
        self._refused = count

    @property
    def late(self) -> int:
        return self._late

    @late.setter
    def late(self, count: int) -> None:
        self._late = count

    def check(self, tokens: int = 0) -> None:
        """See messages.Queue."""
        refusal: QueueFull | None = None
        for replica in self._replicas.values():
            if replica.status == "ready":
                try:
                    replica.engine.queue.check(tokens)
                except QueueFull as error:
                    refusal = error
                else:
                    return
        if refusal is not None:
            self._refused += 1
            raise refusal

    def retry_after(self) -> int:
        """See messages.Queue."""
        ready = [each.engine.queue.retry_after() for each in self._replicas.values() if each.status == "ready"]
        return min(ready, default=1)


def _sums(*counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))
