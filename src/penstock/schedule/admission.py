"""The engine's check of a request. It protects a step: every request that passes can be scheduled, computed and
sampled.

The API process checks requests as well, to name the parameter that its client sent and to apply the server's own, lower
limits. The engine does not rely on that.
"""

import math

from penstock.messages import GenerateRequest, ModelOutput, RequestRejected, TenantShare, check_sampling
from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig

MAX_CHOICES = 1024  # each has a copy of the prompt's token ids


def check_request(request: GenerateRequest, config: SchedulerConfig, vocab_size: int, output: ModelOutput) -> None:
    """Raise RequestRejected for a request that is malformed or longer than the model allows. `output`: the model's."""
    pools = output == "vectors"
    if pools != (request.pooling is not None):
        raise RequestRejected(
            "this model gives vectors, not text: send requests with pooling"
            if pools
            else "this model gives text, not vectors: send requests without pooling"
        )
    if pools and (request.n != 1 or request.output_ids or request.sampling.max_tokens != 1 or request.grammar):
        raise RequestRejected("a request with pooling has one choice, max_tokens=1, and neither output nor grammar")
    if request.pooling is not None and not 0 <= request.pooling.second <= len(request.prompt_ids):
        raise RequestRejected(f"the second text begins at {request.pooling.second}, outside the prompt")
    check_sampling(request.sampling, vocab_size, max_logprobs=vocab_size)
    prompt = len(request.prompt_ids)
    if not prompt:
        raise RequestRejected("the prompt has 0 tokens, at least 1 is needed: send one, for instance the model's BOS")
    for name in ("prompt_ids", "output_ids", "prediction_ids"):
        ids: tuple[int, ...] = getattr(request, name)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestRejected(f"{name} has token id {wrong}; the model's are 0 to {vocab_size - 1}")
    if len(request.prediction_ids) > config.max_model_len:
        raise RequestRejected(
            f"the prediction has {len(request.prediction_ids)} tokens, more than max_model_len="
            f"{config.max_model_len}: shorten it"
        )
    _check_choices(request, config)
    if request.share is not None:
        _check_share(request.share)
    for name in ("arrival", "deadline", "first_token_deadline"):
        if not math.isfinite(time := getattr(request, name) or 0.0):
            raise RequestRejected(f"{name}={time}: give seconds on the engine's clock, or leave it out")
    room = 1 if request.sampling.max_tokens and not pools else 0
    if prompt + room > config.max_model_len:
        raise RequestRejected(
            f"the prompt has {prompt} tokens, at most {config.max_model_len - room} fit max_model_len="
            f"{config.max_model_len} with room for {room} output token: shorten the prompt or raise max_model_len"
        )


def check_memory(request: GenerateRequest, config: SchedulerConfig, cache: KVCache) -> None:
    """Raise RequestRejected for a request that would not fit even if it had all blocks to itself."""
    longest = min(len(request.prompt_ids) + request.sampling.max_tokens, config.max_model_len)
    if request.pooling is not None:
        longest = len(request.prompt_ids) + 1
    for group, (need, pool) in enumerate(zip(cache.demand(longest - 1), cache.pools, strict=True)):
        if need > pool.total:
            raise RequestRejected(
                f"{longest} tokens of prompt and output need {need} KV blocks of {cache.block_size} tokens in group "
                f"{group}, which has {pool.total}: lower max_tokens={request.sampling.max_tokens}, shorten the prompt "
                f"of {len(request.prompt_ids)} tokens, or give the engine more KV memory"
            )


def _check_choices(request: GenerateRequest, config: SchedulerConfig) -> None:
    if not 1 <= request.n <= MAX_CHOICES:
        raise RequestRejected(f"n={request.n}: ask for 1 to {MAX_CHOICES} choices")
    if request.first_choice < 0:
        raise RequestRejected(f"first_choice={request.first_choice}: choices are numbered from 0")
    if request.output_ids and request.n != 1:
        raise RequestRejected(f"n={request.n} with output_ids: resume each choice as a request of its own, with n=1")


def _check_share(share: TenantShare) -> None:
    for name in ("weight", "kv_share"):
        if not 0.0 < (value := getattr(share, name)) < math.inf:
            raise RequestRejected(f"the tenant's {name} is {value}: give a number above 0")
    for name in ("held_back", "max_wait", "step_tokens", "input_price", "output_price", "step_price", "quantum"):
        if not 0 <= (value := getattr(share, name)) < math.inf:
            raise RequestRejected(f"the tenant's {name} is {value}: give 0 or a larger number")
