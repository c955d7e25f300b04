"""Plans what the next step computes.

Every step is decided anew from one rule: running sequences first, in the order of policy.py, then waiting ones. A
sequence that lacks a block takes it from a running one after it in that order, which starts over later. So does a
waiting one of higher priority that lacks only a place. The first in the order is never preempted, and it fits alone, so
every step makes progress.
"""

from collections.abc import Collection
from itertools import islice

from penstock.messages import Capacity
from penstock.schedule.cache import Hit, KVCache
from penstock.schedule.config import SchedulerConfig
from penstock.schedule.drafts.speculation import Speculation
from penstock.schedule.fairness.fair_queue import FairQueue
from penstock.schedule.late import makes_late
from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.pipeline_share import take_share
from penstock.schedule.sequence import Phase, Sequence
from penstock.schedule.step import Outstanding, StepBuilder
from penstock.schedule.step_model import StepModel


class Planner:
    """Plans steps, and moves sequences between the queues, with their blocks, as they start and are preempted."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        cache: KVCache,
        live: LiveRequests,
        speculation: Speculation | None,
        model: StepModel,
    ) -> None:
        self._config = config
        self._depth = capacity.depth
        # Drafts follow the last token, so with speculation a plan builds upon no token that is yet to be sampled.
        self._late_ids = capacity.late_ids and (speculation is None or capacity.depth == 1)
        self._whole_prompts = capacity.keeps == "nothing"
        # If plans cannot build upon each other, each gets a part of the sequences, and as large a part of the tokens.
        self._budget = -(-config.max_num_batched_tokens // (1 if self._late_ids else capacity.depth))
        self._cache = cache
        self._live = live
        self._fair = live.fair
        self._capped = 0  # prompt tokens in this step of sequences with a cap, see FairQueue.cap
        self._blocked: Sequence | None = None  # the first waiting one, if it lacked KV blocks in the last step
        self._speculation = speculation
        self._model = model
        self.gone: list[int] = []  # sequences that the executor is to forget with the next plan
        self.longest_step = 0.0  # seconds for a step with prompts, whether others decode or not; 0: any time
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def next_step(self, outstanding: Collection[Outstanding], now: float) -> StepBuilder:
        """The next step, beside the plans that are outstanding. It has no work where there is nothing to do."""
        step = StepBuilder(self._budget)
        if self._fair is not None:
            self._share_places(self._fair, now)
        elif self._live.waiting:
            self._make_place()
        held = self._hold_back(step) if self._config.target_step_time or self.longest_step else 0
        if self._late_ids:
            self._continue_running(step)
        else:
            self._continue_known(step, len(outstanding))
        if self._live.waiting:
            self._admit_waiting(step, outstanding, now)
        step.budget += held
        # With pipeline stages plans overlap, and the time of a step is its own only while one sequence runs.
        if self._speculation is not None and step.work and (self._late_ids or len(self._live.running) == 1):
            self._speculation.extend(step, len(self._live.running))
        return step

    def forget(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks here, and with the next plan what the executor has of it."""
        self._cache.free(sequence)
        self.gone.append(sequence.id)

    def start_over(self) -> None:
        """Preempt every running sequence. The executor has forgotten them."""
        for sequence in reversed(self._live.running.copy()):
            self._preempt(sequence, None)
        self.gone.clear()

    def resize(self, limits: tuple[int, ...]) -> None:
        """Let each KV group use only blocks below its limit. What is only cached above is forgotten, and sequences with
        blocks there start over, the last in the order first. Raises ValueError if a sequence of max_model_len would not
        fit."""
        self._cache.check_limits(limits, self._config.max_model_len)
        self._cache.resize(limits)
        for sequence in reversed(self._live.running.copy()):
            if self._cache.exceeds(sequence):
                self._preempt(sequence, None)

    def _hold_back(self, step: StepBuilder) -> int:
        """Take tokens from the budget, so that the prompts beside decoding sequences leave a step of the target time,
        and any prompts one of at most `longest_step`. Return how many."""
        running = self._live.running
        prompts = [sequence for sequence in running if sequence.expected - sequence.planned > 1]
        decodes = len(running) - len(prompts)
        target = self._config.target_step_time if decodes else 0.0
        if self.longest_step:
            target = min(target or self.longest_step, self.longest_step)
        if not target or not (prompts or self._live.waiting):
            return 0
        context = prompts[0].planned if prompts else 0
        allowed = self._model.prompt_tokens(decodes, context, target)
        # A text that is computed as a whole joins a step however long it takes.
        first = self._live.waiting.peek() if self._whole_prompts and self._live.waiting else None
        whole = 0 if first is None else first.target
        held = max(0, step.budget - max(decodes + allowed + len(prompts), whole))
        step.budget -= held
        return held

    def _continue_running(self, step: StepBuilder) -> None:
        """Plan work for running sequences, as far as there are blocks."""
        running = self._live.running  # loses only sequences that are not visited yet: preempted ones
        work, sequences = step.work, step.sequences
        others = 0
        for index, sequence in enumerate(running):
            end = sequence.planned + 1
            if end == sequence.expected and end <= sequence.slots and end < sequence.limit:
                # The common case, written out: one token with room for it.
                sequence.planned = end
                sequence.expected = end + 1
                work.append(sequence.decode)
                sequences.append(sequence)
            else:
                # Leave a token to each later sequence, however long this one's prompt is.
                decodes, later = index - others, len(running) - index - 1
                self._extend(sequence, step.budget - decodes - later, step)
                others += 1
        decodes = len(running) - others
        step.budget -= decodes
        step.computed += decodes
        step.decodes += decodes

    def _continue_known(self, step: StepBuilder, outstanding: int) -> None:
        """Plan work for running sequences whose tokens are all known, a share of them for each outstanding plan."""
        sequences, decodes = take_share(self._live.running, self._depth, outstanding)
        for sequence in sequences:
            decodes -= sequence.planned + 1 == sequence.expected
            if sequence.phase is Phase.RUNNING:  # not preempted for one before it
                self._extend(sequence, step.budget - decodes, step)

    def _extend(self, sequence: Sequence, allowance: int, step: StepBuilder) -> None:
        """Plan what is left to compute of a running sequence: at most `allowance` tokens, none without a block."""
        if self._fair is not None and sequence.expected - sequence.planned > 1:  # not a decode
            allowance = self._allowance(sequence, allowance)
        end = min(sequence.target, sequence.planned + allowance)
        if end <= sequence.planned:
            return
        if end > sequence.slots:
            reach = self._cache.reach(sequence)
            if reach == sequence.planned:
                if not self._take_block(sequence):
                    return
                reach = self._cache.reach(sequence)
            end = min(end, reach)
        if end > sequence.slots:
            step.blocks.append((sequence.id, self._cache.grow(sequence, end)))
        if self._fair is not None:
            self._note_capped(sequence, end - sequence.planned)
        step.add(sequence, end)

    def _take_block(self, sequence: Sequence) -> bool:
        """Preempt later sequences until every group has a block. Returns False when the sequence
        must wait: for a result that lifts a fence, or, with all later ones gone, for an earlier sequence to end.
        """
        pools = self._cache.pools
        while not all(pool.available for pool in pools):
            if all(pool.available or pool.fenced for pool in pools):
                return False
            victim = self._live.victim(sequence)
            if victim is None:
                return False
            self._preempt(victim, sequence)
        return True

    def _make_place(self) -> None:
        """Preempt a running sequence for each waiting one that comes before it and has a higher priority, if all places
        are taken. Arrivals and deadlines alone preempt no sequence: the repeated work would cost more."""
        waiting = self._live.waiting
        places = self._config.max_num_seqs - len(self._live.running)
        if places >= len(waiting):
            return
        for sequence in islice(waiting, places, None):  # the preempted join it behind the one they give way to
            victim = self._live.victim(sequence)
            if victim is None or sequence.request.message.priority >= victim.request.message.priority:
                return
            self._preempt(victim, sequence)

    def _share_places(self, fair: FairQueue, now: float) -> None:
        """Let waiting sequences take the places of running ones, if classes or tenants give them a claim."""
        fair.begin(now)
        self._capped, blocked, self._blocked = 0, self._blocked, None
        if self._live.waiting and (claim := fair.claim(self._live.running, blocked)) is not None:
            taker, victims = claim
            for victim in victims:
                self._preempt(victim, taker)

    def _allowance(self, sequence: Sequence, tokens: int) -> int:
        """Return how many of `tokens` a step may compute of a prompt, as others are to wait for a short step only. A
        prompt that runs gets at least one, so that every step makes progress."""
        if self._fair is None or self._whole_prompts or (cap := self._fair.cap(sequence)) is None:
            return tokens
        return min(tokens, max(cap - self._capped, sequence.phase is Phase.RUNNING))

    def _note_capped(self, sequence: Sequence, tokens: int) -> None:
        if self._fair is not None and tokens > 1 and self._fair.cap(sequence) is not None:
            self._capped += tokens

    def _preempt(self, victim: Sequence, taker: Sequence | None) -> None:
        """Start a sequence over, for another one or for none. Tokens still in flight are kept when they come, and it
        starts after that."""
        self._live.preempt(victim, taker)
        self.forget(victim)
        victim.preemptions += 1
        self.preemptions += 1

    def _admit_waiting(self, step: StepBuilder, outstanding: Collection[Outstanding], now: float) -> None:
        """Start waiting sequences in order, each only if all its known tokens fit. None overtakes another.

        So none is admitted while a running sequence lacks a block, and none that was preempted in this step.
        """
        waiting, running = self._live.waiting, self._live.running
        while waiting and step.budget > 0 and len(running) < self._config.max_num_seqs:
            sequence = waiting.peek()
            if sequence is None:
                return
            if sequence.preemptions and any(sequence in plan.sequences for plan in outstanding):
                return  # preempted, and not all of its tokens are known yet
            if self._whole_prompts and sequence.target > step.budget and step.work:
                return
            # A block to spare while others run, so that an admission is not undone by the next block they need.
            hit = self._cache.find(sequence, spare=1 if running else 0)
            if hit is None:
                if self._fair is not None and not any(pool.fenced for pool in self._cache.pools):
                    self._blocked = sequence
                return
            tokens = min(sequence.target - hit.computed, self._allowance(sequence, step.budget))
            if not tokens:
                return  # its class may compute no more in this step
            if makes_late(step, tokens, hit.computed, self._model, now):
                return
            self._note_start(sequence, hit.computed, now)
            self._start(sequence, hit, step)

    def _start(self, sequence: Sequence, hit: Hit, step: StepBuilder) -> None:
        """Start the first waiting sequence."""
        self._live.start(sequence, hit.computed)
        self._cache.start(sequence, hit)
        allowance = self._allowance(sequence, step.budget)
        end = min(sequence.target, sequence.planned + allowance, self._cache.reach(sequence))
        self._note_capped(sequence, end - sequence.planned)
        self._cache.grow(sequence, end)
        if hit.tails:
            step.copies += self._cache.copies(sequence, hit)
            step.tails.append(hit.tails)
        step.introduce(sequence)
        step.add(sequence, end)

    def _note_start(self, sequence: Sequence, computed: int, now: float) -> None:
        """Time and prefix hits count for the first start only, not for a return after preemption."""
        state = sequence.request
        if not state.started:
            state.cached_tokens = min(computed, sequence.num_prompt)
            if self._config.enable_prefix_caching and not sequence.wants_rows:
                self.prefix_queries += sequence.num_prompt
                self.prefix_hits += state.cached_tokens
        if sequence.started < 0:
            sequence.started = now
