"""Predicts first tokens that come too late: of waiting requests that cannot meet their deadline, and of prompts that
another prompt in their step would delay."""

import math
from itertools import chain, islice

from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig
from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.sequence import Request, Sequence
from penstock.schedule.step import StepBuilder
from penstock.schedule.step_model import StepModel, StepSize


def late_requests(
    live: LiveRequests, cache: KVCache, config: SchedulerConfig, model: StepModel, now: float
) -> list[tuple[Request, float]]:
    """Return the waiting requests that would miss their deadline even if they started now, and by how many seconds.

    Only requests that the next step can start are checked.
    """
    late: list[tuple[Request, float]] = []
    free = config.max_num_seqs - len(live.running)
    if free <= 0 or not live.waiting or not model.knows_prompts:
        return late
    ahead = 0  # prompt tokens to compute first: those of running sequences, then those of earlier waiting ones
    decodes = 0  # running sequences that decode
    for sequence in live.running:
        left = sequence.expected - sequence.planned
        if left > 1:
            ahead += left
        else:
            decodes += 1
    for sequence in live.waiting:
        if free <= 0 or ahead >= config.max_num_batched_tokens:
            break
        tokens, deadline = len(sequence.tokens), _deadline(sequence)
        if deadline < math.inf:
            wait = _time_to_first_token(sequence, tokens, ahead, decodes, config, model)
            # The prefix cache is searched only if the whole prompt would be late.
            if now + wait > deadline and (hit := cache.find(sequence, 0)) is not None and hit.computed:
                tokens -= hit.computed
                wait = _time_to_first_token(sequence, tokens, ahead, decodes, config, model)
            if now + wait > deadline:
                late.append((sequence.request, now + wait - deadline))
                continue
        ahead += tokens
        free -= 1
    return late


def first_due(live: LiveRequests, most: int) -> float:
    """Return when the first token of a live sequence is due at the earliest; inf if none has a deadline. Of those that
    wait to run, the first `most` count."""
    sequences = chain(live.running, islice(live.waiting, most))
    return min((_first_token_due(each) for each in sequences if each.first_token < 0), default=math.inf)


def makes_late(step: StepBuilder, tokens: int, computed: int, model: StepModel, now: float) -> bool:
    """Return whether `tokens` more prompt tokens would make a first token late that is on time without them.

    All tokens of a step come at its end, so a longer step delays the first tokens of the prompts that it completes.
    """
    if not model.knows_prompts:
        return False
    units = zip(step.sequences, step.work, strict=True)
    deadlines = (_first_token_due(sequence) for sequence, work in units if sequence.first_token < 0 and work.sample)
    due = min(deadlines, default=math.inf)
    if due == math.inf:
        return False
    size = StepSize.of(step)
    longer = size._replace(tokens=size.tokens + tokens, pairs=size.pairs + tokens * (computed + tokens / 2))
    return model.spread * model.seconds(size) <= due - now < model.spread * model.seconds(longer)


def _deadline(sequence: Sequence) -> float:
    """Return when a waiting sequence's first token is due. inf for a request of which a sequence has started:
    it is never dropped."""
    return math.inf if sequence.request.started else _first_token_due(sequence)


def _first_token_due(sequence: Sequence) -> float:
    """Return the earlier one of the request's two deadlines; inf if it has none."""
    message = sequence.request.message
    if message.deadline is None and message.first_token_deadline is None:
        return math.inf
    first = math.inf if message.first_token_deadline is None else message.first_token_deadline
    return first if message.deadline is None else min(first, message.deadline)


def _time_to_first_token(
    sequence: Sequence, tokens: int, ahead: int, decodes: int, config: SchedulerConfig, model: StepModel
) -> float:
    """Return the seconds that most prompts of this size take, if the sequence has `tokens` left to compute and `ahead`
    prompt tokens are computed before them."""
    total = ahead + tokens
    per_step = config.max_num_batched_tokens - decodes
    if config.target_step_time and decodes:
        per_step = min(per_step, model.prompt_tokens(decodes, 0, config.target_step_time))
    steps = max(1, math.ceil(total / max(per_step, 1)))
    pairs = tokens * (len(sequence.tokens) - tokens / 2) + ahead * ahead / 2
    decode_step = model.seconds(StepSize(decodes))
    return model.spread * (model.seconds(StepSize(decodes, total, pairs)) + (steps - 1) * decode_step)
