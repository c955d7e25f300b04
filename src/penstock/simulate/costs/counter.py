"""Counts what plans compute. A plan names sequences; their positions follow from the plans before it."""

from penstock.messages import StepPlan, Work
from penstock.simulate.costs.work import StepLoad


class StepCounter:
    """Follows the plans of one scheduler.

    Most plans repeat the one before: the same sequences decode. These only increment a counter, which is added to the
    positions when another plan comes.
    """

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}  # sequence -> tokens computed
        self._work: tuple[Work, ...] = ()  # of the last plan, if all of it decodes
        self._repeats = 0
        self._last = StepLoad()
        self.repeated = False  # the last plan has the same work as the one before

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are stored, of all sequences that run."""
        return sum(self._positions.values()) + self._repeats * len(self._work)

    def forget(self) -> None:
        """Forgets every sequence."""
        self._positions.clear()
        self._work, self._repeats = (), 0

    def count(self, plan: StepPlan) -> StepLoad:
        """Returns what the next plan computes. Raises ValueError for drafts: their acceptance is not simulated."""
        work = plan.work
        self.repeated = work == self._work and not plan.gone and not plan.new
        if self.repeated:
            self._repeats += 1
            decodes, context, *rest = self._last
            self._last = StepLoad(decodes, context + decodes, *rest)
            return self._last
        positions = self._positions
        if self._repeats:
            for each in self._work:
                positions[each.seq] += self._repeats
            self._repeats = 0
        for seq in plan.gone:
            del positions[seq]
        for new in plan.new:
            positions[new.seq] = new.num_computed
        decodes = decode_context = prompt_tokens = pairs = prompt_context = sampled = 0
        for seq, count, sample, drafts in [(each.seq, each.count, each.sample, each.draft_ids) for each in work]:
            start = positions[seq]
            positions[seq] = end = start + count
            sampled += sample
            if count == 1 and sample:
                decodes += 1
                decode_context += end
            elif drafts:
                raise ValueError("a plan has speculative tokens, which are not simulated: use --speculation off")
            else:
                prompt_tokens += count
                pairs += count * (start + end + 1) // 2
                prompt_context += end
        self._work = () if prompt_tokens else work
        self._last = StepLoad(decodes, decode_context, prompt_tokens, pairs, prompt_context, sampled)
        return self._last
