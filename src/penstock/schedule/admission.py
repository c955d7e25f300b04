"""Which requests can never be served, told before anything is done for them."""

from penstock.messages import GenerateRequest, RequestRejected
from penstock.schedule.cache import KVCache
from penstock.schedule.config import SchedulerConfig

_MAX_TOKEN_ID = 2**32 - 1  # as packed into prefix keys


def check_request(request: GenerateRequest, config: SchedulerConfig) -> None:
    """RequestRejected where the request is malformed or longer than the model allows."""
    prompt = len(request.prompt_ids)
    if not prompt:
        raise RequestRejected("the prompt has 0 tokens, at least 1 is needed: send one, for instance the model's BOS")
    tokens = request.prompt_ids + request.output_ids
    for token in (min(tokens), max(tokens)):
        if not 0 <= token <= _MAX_TOKEN_ID:
            raise RequestRejected(f"token id {token} is not in 0 .. {_MAX_TOKEN_ID}: send ids the model knows")
    if request.n < 1:
        raise RequestRejected(f"n={request.n}: ask for at least 1 choice")
    if request.output_ids and request.n != 1:
        raise RequestRejected(f"n={request.n} with output_ids: resume each choice as a request of its own, with n=1")
    room = 1 if request.sampling.max_tokens else 0
    if prompt + room > config.max_model_len:
        raise RequestRejected(
            f"the prompt has {prompt} tokens, at most {config.max_model_len - room} fit max_model_len="
            f"{config.max_model_len} with room for {room} output token: shorten the prompt or raise max_model_len"
        )


def check_memory(request: GenerateRequest, config: SchedulerConfig, cache: KVCache) -> None:
    """RequestRejected where the request would not fit even with all blocks to itself."""
    longest = min(len(request.prompt_ids) + request.sampling.max_tokens, config.max_model_len)
    for group, (need, pool) in enumerate(zip(cache.demand(longest - 1), cache.pools, strict=True)):
        if need > pool.total:
            raise RequestRejected(
                f"{longest} tokens of prompt and output need {need} KV blocks of {cache.block_size} tokens in group "
                f"{group}, which has {pool.total}: lower max_tokens={request.sampling.max_tokens}, shorten the prompt "
                f"of {len(request.prompt_ids)} tokens, or give the engine more KV memory"
            )
