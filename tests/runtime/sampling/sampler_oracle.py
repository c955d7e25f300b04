"""The definition of sampling, one row at a time in float64, written independently of the code under test.

It also finds choices that are so close that rounding of the logits may change them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.messages import SamplingParams
from penstock.runtime.sampling import noise
from penstock.runtime.sampling.sampler import GREEDY_BELOW

Reals = NDArray[np.float64]  # [vocab]
Marks = NDArray[np.bool_]  # [vocab]


def edited(logits: ArrayLike, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Reals:
    """Logits after biases, penalties and the ban of stops."""
    x = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt_ids, *output_ids}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(output_ids):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output_ids).count(token)
    if len(output_ids) < params.min_tokens:
        for token in params.stops():
            x[token] = -np.inf
    return x


def kept(logits: Reals, params: SamplingParams) -> Marks:
    """Which tokens the filters keep, of edited logits. The best is always one of them."""
    order = np.lexsort((np.arange(logits.size), -logits))
    log_p = (logits[order] - logits[order[0]]) / params.temperature
    keep = np.ones(logits.size, np.bool_)
    if params.top_n_sigma > 0:
        keep = logits[order] >= logits.max() - params.top_n_sigma * logits[np.isfinite(logits)].std()
    if params.top_k:
        keep[params.top_k :] = False
    weights = np.where(keep, np.exp(log_p), 0.0)
    if params.top_p < 1:
        ahead = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        keep &= ahead < params.top_p * weights.sum()
    if params.min_p > 0:
        keep &= log_p >= np.log(params.min_p)
    keep[0] = True
    by_token = np.empty_like(keep)
    by_token[order] = keep
    return by_token


def scores(
    logits: ArrayLike, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Reals:
    """A score for every token; the next of the choice is that of the highest, the lowest id of equals.

    logits [vocab]: the model's own. The score is log p relative to the best token's, plus noise, and -inf for what the
    filters drop; or, where greedy, the edited logit.
    """
    x = edited(logits, params, prompt_ids, output_ids)
    if params.temperature < GREEDY_BELOW:
        return x
    return np.where(kept(x, params), _with_noise(x, params, choice, len(output_ids)), -np.inf)


def is_close(
    logits: ArrayLike,
    params: SamplingParams,
    choice: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    tolerance: float = 1e-4,
) -> bool:
    """Whether another token could be chosen if the edited logits' differences changed by up to `tolerance`.

    That is where two candidates are that close, noise included, or where a token that would win, or the winner, is that
    close to being dropped or kept by a filter.
    """
    x = edited(logits, params, prompt_ids, output_ids)
    if params.temperature < GREEDY_BELOW:
        best, second = np.sort(x)[::-1][:2]
        return bool(best - second <= tolerance)
    surely, possibly = _kept_within(x, params, tolerance)
    noisy = _with_noise(x, params, choice, len(output_ids))
    winner = int(np.where(kept(x, params), noisy, -np.inf).argmax())
    rivals = possibly & (noisy >= noisy[winner] - tolerance / params.temperature)
    rivals[winner] = False
    return bool(not surely[winner] or rivals.any())


def _with_noise(x: Reals, params: SamplingParams, choice: int, index: int) -> Reals:
    key = noise.keys(np.array([noise.stream(params.seed, choice)], np.uint64), np.array([index]))
    token_ids = np.arange(x.size, dtype=np.uint32)
    hashes = noise.hash_tokens(token_ids, key)
    sum_of_both: Reals = (x - x.max()) / params.temperature + noise.gumbel(hashes)[0]
    return sum_of_both


def _kept_within(x: Reals, params: SamplingParams, tolerance: float) -> tuple[Marks, Marks]:
    """The tokens kept whatever such a change does, and those that some such change keeps."""
    falling = -np.sort(-x)
    log_p = (x - falling[0]) / params.temperature
    shift = tolerance / params.temperature
    # How many tokens are ahead of each: at least, and at most (itself not counted).
    fewest = np.searchsorted(-falling, -(x + tolerance), side="left")
    most = np.searchsorted(-falling, -(x - tolerance), side="right") - 1
    limit = params.top_k or x.size
    surely, possibly = most < limit, fewest < limit
    if params.top_n_sigma > 0:
        above = x - falling[0] + params.top_n_sigma * x[np.isfinite(x)].std()
        shifted = tolerance * (1 + params.top_n_sigma)  # by so much the difference may change
        surely &= (above >= shifted) | (most == 0)
        possibly &= above >= -shifted
        limit = min(limit, int((above >= 0).sum()))
        if params.top_p < 1 and (np.abs(above) < shifted).any():  # the mass may change by a whole token
            surely[:] = False
    if params.top_p < 1:
        weights = np.exp((falling - falling[0]) / params.temperature) * (np.arange(x.size) < limit)
        sums = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
        own = np.exp(log_p) / weights.sum()
        share_at_most = np.maximum(sums[np.minimum(most + 1, limit)] - own, 0.0) * np.exp(2 * shift)
        share_at_least = sums[np.minimum(fewest, limit)] * np.exp(-2 * shift)
        surely &= (share_at_most < params.top_p) | (most == 0)
        possibly &= (share_at_least < params.top_p) | (fewest == 0)
    if params.min_p > 0:
        surely &= (log_p >= np.log(params.min_p) + shift) | (most == 0)
        possibly &= log_p >= np.log(params.min_p) - shift
    return surely, possibly
