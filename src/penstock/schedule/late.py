"""Finds waiting requests that cannot make their deadline before their prompt is computed, and keeps a step from making
others late."""

import math

from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig
from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.sequence import Request, Sequence
from penstock.schedule.step import StepBuilder
from penstock.schedule.step_model import StepModel, StepSize


def late_requests(
    live: LiveRequests, cache: KVCache, config: SchedulerConfig, model: StepModel, now: float
) -> list[tuple[Request, float]]:
    """Return the requests that would miss their deadline if they started now, and by how many seconds.

    Looks only at those that the next step can start.
    """
    late: list[tuple[Request, float]] = []
    free = config.max_num_seqs - len(live.running)
    if free <= 0 or not live.waiting or not model.knows_prompts:
        return late
    ahead = decodes = 0  # tokens of prompts, in running sequences and then in waiting ones that start before
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
            wait = _seconds(sequence, tokens, ahead, decodes, config, model)
            if now + wait > deadline and (hit := cache.find(sequence, 0)) is not None and hit.computed:
                tokens -= hit.computed
                wait = _seconds(sequence, tokens, ahead, decodes, config, model)
            if now + wait > deadline:
                late.append((sequence.request, now + wait - deadline))
                continue
        ahead += tokens
        free -= 1
    return late


def makes_late(step: StepBuilder, tokens: int, model: StepModel, now: float) -> bool:
    """Whether so many more tokens of a prompt would make a first token late that the step gives in time without them:
    it gives none before it has computed everything."""
    if not model.knows_prompts:
        return False
    waits = (seq for seq, work in zip(step.sequences, step.work, strict=True) if seq.first_token < 0 and work.sample)
    due = min(map(_due, waits), default=math.inf)
    if due == math.inf:
        return False
    size = StepSize.of(step)
    more = size._replace(tokens=size.tokens + tokens, pairs=size.pairs + tokens * tokens / 2)
    return model.spread * model.seconds(size) <= due - now < model.spread * model.seconds(more)


def _deadline(sequence: Sequence) -> float:
    """When the first token is due. Never for a request that has started: its prompt is computed already."""
    return math.inf if sequence.request.started else _due(sequence)


def _due(sequence: Sequence) -> float:
    message = sequence.request.message
    if message.deadline is None and message.first_token_deadline is None:
        return math.inf
    first = math.inf if message.first_token_deadline is None else message.first_token_deadline
    return first if message.deadline is None else min(first, message.deadline)


def _seconds(
    sequence: Sequence, tokens: int, ahead: int, decodes: int, config: SchedulerConfig, model: StepModel
) -> float:
    """The expected time to the first token, with `ahead` tokens of prompts to compute before."""
    total = ahead + tokens
    room = config.max_num_batched_tokens - decodes
    if config.target_step_time and decodes:
        room = min(room, model.prompt_tokens(decodes, 0, config.target_step_time))
    steps = max(1, math.ceil(total / max(room, 1)))
    pairs = tokens * (len(sequence.tokens) - tokens / 2) + ahead * ahead / 2
    step = model.seconds(StepSize(decodes))
    return model.spread * (model.seconds(StepSize(decodes, total, pairs)) + (steps - 1) * step)
