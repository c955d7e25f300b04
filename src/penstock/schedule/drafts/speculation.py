"""Adds drafts to steps in which every sequence decodes."""

import math
from typing import NamedTuple

from penstock.messages import StepResult, Work
from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig
from penstock.schedule.drafts.cost import OUTLIER, StepTimes, draft_counts
from penstock.schedule.drafts.drafter import Acceptance, Candidate, Drafter
from penstock.schedule.drafts.texts import TENANTS, RecentOutputs
from penstock.schedule.sequence import Sequence
from penstock.schedule.step import Outstanding, StepBuilder

INDEXED_TOKENS = 8192  # in one step: less than a millisecond
SHORTEST_OUTPUT = 8  # tokens of an output that is kept for later ones
MOST_DELAY = 0.005  # of a sequence's time with plain steps: what drafts of others may add to it
MOST_LEAD = 64  # plain steps that a sequence may be ahead and give to others
LOOK_SHARE = 0.005  # of a plain step: the time to look for drafts of sequences that copy nothing
LOOK_SECONDS = 7e-6  # for one sequence
# A look searches the texts for drafts in a step. After looks that gave no accepted drafts, some steps have no look.
MOST_IDLE = 6  # steps from one look to the next, at most
FIRST_LOOKS = 8  # so many may give none after a prompt, before steps go without a look
MOST_LOOKS = 64  # the same after drafts that were accepted, at most


class DraftCounts(NamedTuple):
    """Counters since start."""

    units: int = 0  # of work, with drafts
    tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by place among the drafts of a unit


NO_DRAFTS = DraftCounts()


class Speculation:
    """Chooses drafts, and learns from results how many of them pay.

    The planner calls `extend` for each plan, the scheduler `note` for its result. All that decides is in the events
    that the scheduler logs.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self._most = config.num_speculative_tokens
        self._most_in_step = config.max_step_drafts
        self._recent: dict[tuple[str, str], RecentOutputs] | None = {} if config.speculation == "suffix" else None
        self._cache = cache
        self._times, self._acceptance = StepTimes(), Acceptance()
        self._step = 0  # steps noted
        self._planned_anew = False  # whether the last of them had drafts: the next one cannot repeat its plan
        self._look_at, self._idle = 0, 0  # the step of the next look, and its distance from the last one
        self._looks = 0.0  # looks that may still give no accepted drafts before steps have no look
        self._turn = 0  # the place in the work at which to look next
        self._kinds: dict[int, int] = {}  # by sequence: of the drafts of outstanding plans
        self._forced: dict[int, tuple[int, ...]] = {}  # by sequence: the tokens that must follow its last one
        self.counts = NO_DRAFTS
        self._drafts = self._drafted = self._accepted = 0
        self._accepted_at = [0] * self._most

    # -- plans ------------------------------------------------------------------------------------------------

    def extend(self, step: StepBuilder, running: int) -> None:
        """Add drafts to a step of decodes, where they pay. `running` sequences may need a block each.

        After a look that gives no accepted drafts, the next one comes later: the weights have evicted this code from
        the processor's caches, so a look takes several times as long as a profile shows. But for each step that
        accepted drafts saved, one more look may give none: a copy that ends often goes on after a few tokens.
        """
        if step.new:
            self._look_at, self._idle = 0, 0
            self._looks = max(self._looks, FIRST_LOOKS)
            return
        count = len(step.work)
        if step.computed != count or (self._step < self._look_at and not self._forced):
            return
        plain = self._times.plain(count, self._step)
        most = min(self._most_in_step, step.budget)
        if plain is None or most < 1:
            return
        if self._looks >= 1:
            self._looks -= 1
        else:
            self._idle = min(self._idle + 1, MOST_IDLE)
            self._look_at = self._step + self._idle
        places, candidates, limits = self._candidates(step, max(1, int(plain * LOOK_SHARE / LOOK_SECONDS)))
        if not candidates:
            return
        seconds = self._times.with_drafts(count, plain, most, self._step)
        rooms = [plain * (1 + MOST_DELAY * each.num_output) + each.lead for each in step.sequences]
        rooms_of_candidates = [rooms[place] for place in places]
        for place in places:
            rooms[place] = math.inf
        probabilities = [each.probability for each in candidates]
        counts = draft_counts(probabilities, limits, rooms_of_candidates, min(rooms), count, seconds)
        for place, candidate, drafts in zip(places, candidates, counts, strict=True):
            if drafts:
                self._add(step, place, candidate, drafts, running)

    def _candidates(self, step: StepBuilder, looks: int) -> tuple[list[int], list[Candidate], list[int]]:
        """The places in the step's work that can have drafts, where these come from, and how many at most.

        Looks at sequences that copy, and at so many others: the next ones in turn.
        """
        places, candidates, limits = [], [], []
        left, count = INDEXED_TOKENS, len(step.sequences)
        self._turn = (self._turn + looks) % count if looks < count else 0
        for place, sequence in enumerate(step.sequences):
            forced = self._forced.get(sequence.id)
            copies = sequence.drafter is not None and sequence.drafter.copies
            if not (forced or copies or (place - self._turn) % count < looks):
                continue
            # With a token in flight, the position of the drafts is not certain yet.
            if sequence.planned != sequence.computed + 1 or sequence.expected != len(sequence.tokens) + 1:
                continue
            most = min(self._most, sequence.limit - 1 - sequence.planned)
            if most < 1:
                continue
            drafter = sequence.drafter
            if drafter is None:
                drafter = sequence.drafter = self._drafter(sequence)
            if forced:
                places.append(place)
                candidates.append(drafter.forced(forced, self._acceptance))
                limits.append(min(most, len(forced)))
                continue
            if behind := drafter.behind():
                drafter.catch_up(left)
                left -= min(behind, left)
                if not left and drafter.behind():
                    continue
            candidate = drafter.candidate(self._acceptance)
            if candidate is not None:
                places.append(place)
                candidates.append(candidate)
                limits.append(most)
        return places, candidates, limits

    def _drafter(self, sequence: Sequence) -> Drafter:
        message = sequence.request.message
        recent = None
        if self._recent is not None:
            recent = self._recent_of(message.tenant, message.cache_salt)
        return Drafter(sequence.tokens, sequence.num_prompt, message.prediction_ids, recent)

    def _recent_of(self, tenant: str, salt: str) -> RecentOutputs:
        """The outputs of one tenant and salt. Others never see them. The tenant used longest ago gives way."""
        assert self._recent is not None
        key = (tenant, salt)
        found = self._recent.pop(key, None) or RecentOutputs()
        self._recent[key] = found
        if len(self._recent) > TENANTS:
            del self._recent[next(iter(self._recent))]
        return found

    def _add(self, step: StepBuilder, place: int, candidate: Candidate, count: int, running: int) -> None:
        """Verify `count` drafts with the token that the step's work at `place` computes. Blocks for them are taken only
        while one is left for each running sequence."""
        sequence = step.sequences[place]
        room = max(sequence.slots, self._cache.reach(sequence) - running * self._cache.block_size)
        ids = tuple(candidate.source.drafts(min(count, room - sequence.planned)))
        count = len(ids)
        if not count:
            return
        end = sequence.planned + count
        if end > sequence.slots:
            step.blocks.append((sequence.id, self._cache.grow(sequence, end)))
        step.work[place] = Work(sequence.id, 1 + count, True, ids)
        step.budget -= count
        step.computed += count
        sequence.planned = end
        sequence.expected += count
        self._kinds[sequence.id] = candidate.kind

    # -- results ----------------------------------------------------------------------------------------------

    def note(self, step: Outstanding, result: StepResult, seconds: float | None) -> None:
        """Count the drafts of a step, and its time from plan to result. `seconds` is None if another plan was
        outstanding meanwhile: the time is then not the step's alone, and does not count.

        A plain step usually repeats the plan before it. After one with drafts it does not, and takes longer: drafts pay
        for that too, and it does not count as the time of a plain step.
        """
        self._step += 1
        after_drafts, self._planned_anew = self._planned_anew, False
        self._forced = dict(result.forced)
        sequences, drafted, tokens = len(step.work), 0, len(step.work)
        if step.num_tokens > sequences:
            tokens = 0
            for sequence, unit, given in zip(step.sequences, step.work, result.results, strict=True):
                gained = len(given.token_ids)
                tokens += gained
                if unit.draft_ids:
                    drafts = len(unit.draft_ids)
                    drafted += drafts
                    self._note_drafts(sequence, drafts, gained - 1)
                    self._looks = min(self._looks + (gained - 1) / sequences, MOST_LOOKS)
            if not drafted:
                return  # a step with prompts
            self.counts = DraftCounts(self._drafts, self._drafted, self._accepted, tuple(self._accepted_at))
        self._planned_anew = drafted > 0
        if seconds is None:
            return
        if (drafted or after_drafts) and (plain := self._times.plain(sequences, self._step)) is not None:
            for sequence, given in zip(step.sequences, result.results, strict=True):
                lead = sequence.lead + len(given.token_ids) * plain - min(seconds, OUTLIER * tokens * plain)
                sequence.lead = min(lead, MOST_LEAD * plain)
        if drafted or not after_drafts:
            self._times.note(sequences, drafted, seconds, self._step)

    def dropped(self, step: Outstanding) -> None:
        """Forget a step that has no result."""
        self._forced = {}
        for sequence in step.sequences:
            self._kinds.pop(sequence.id, None)

    def _note_drafts(self, sequence: Sequence, count: int, accepted: int) -> None:
        kind = self._kinds.pop(sequence.id)
        if accepted < 0:
            return  # the sequence failed
        assert sequence.drafter is not None
        sequence.drafter.note(kind, count, accepted, self._acceptance)
        if accepted:
            self._look_at, self._idle = 0, 0
        self._drafts += 1
        self._drafted += count
        self._accepted += accepted
        for place in range(accepted):
            self._accepted_at[place] += 1

    def ended(self, sequence: Sequence) -> None:
        """Keep the output of a sequence that has ended, for later ones of its tenant."""
        if self._recent is not None and sequence.num_output >= SHORTEST_OUTPUT:
            message = sequence.request.message
            self._recent_of(message.tenant, message.cache_salt).add(sequence.tokens[sequence.num_prompt :])
