"""The sampler in NumPy: it defines which token a row gets, and serves machines without native kernels.

The order of processing is

    raw logits -> logit_bias -> repetition, then presence and frequency penalties -> min_tokens
               -> top_n_sigma -> temperature -> top_k -> top_p -> min_p -> argmax of log p + noise

as in transformers, whose filters also see what the earlier ones left: top_p takes its share of the mass of the tokens
that top_n_sigma and top_k keep. top_n_sigma comes first, as in llama.cpp; temperature, which comes last there, does not
change what it keeps. (vLLM applies min_p before top_k and top_p. It compares with the most likely token, which every
filter keeps, so the order changes only what top_p takes its share of.) Logprobs are those of the raw logits. Equal
logits rank by ascending token id everywhere: top_k keeps exactly k tokens, and a greedy row takes the lowest id.

Plain and vectorised: filtered rows are sorted. Each row is treated alone, so its token does not depend on the batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import (
    AHEAD,
    ALL_BANNED,
    CHOSEN,
    FILTERED,
    GREEDY,
    NOT_FINITE,
    ROW,
    Chosen,
    EditRows,
    MaskRows,
    SamplingRows,
)
from penstock.runtime.sampling import noise
from penstock.runtime.sampling.logprobs import Logits, pack_logprobs
from penstock.runtime.sampling.watermark import Watermark


def choose(
    logits: Tensor,
    logit_rows: Tensor,
    sampling: SamplingRows,
    edits: EditRows,
    token_ids: Tensor,
    *,
    edited: Tensor | None,
    filtered: bool,
    logprobs: int,
    masks: MaskRows | None = None,
    watermark: Watermark | None = None,
) -> Chosen:
    """The next token of each row of fp32 logits [n, vocab], which may be overwritten. See StepKernels.choose.

    With a watermark, every row is in `edited`.
    """
    values, rows = logits.numpy(), logit_rows[ROW].numpy()
    outputs = sampling.outputs.numpy()[rows] + logit_rows[AHEAD].numpy()
    raw = values.copy() if logprobs >= 0 and (edited is not None or masks is not None) else values
    # A maximum is NaN where any logit is.
    status = np.where(np.isfinite(values.max(axis=1)), CHOSEN, NOT_FINITE).astype(np.int32)
    keys = noise.keys(sampling.streams.numpy().view(np.uint64)[rows], outputs)
    for place in [] if edited is None else edited.tolist():
        if status[place] == CHOSEN:
            row = int(rows[place])
            edit(values[place], row, int(outputs[place]), edits, token_ids[row].numpy())
            if watermark is not None:
                prompt = int(edits.prompt[row])
                mark(
                    watermark, values[place], keys[place : place + 1], token_ids[row, prompt:][: outputs[place]].numpy()
                )
            status[place] = CHOSEN if np.isfinite(values[place].max()) else ALL_BANNED
    if masks is not None:
        for place, line in enumerate(masks.lines[: len(values)].tolist()):
            if line >= 0 and status[place] == CHOSEN:
                mask(values[place], masks.words[line].numpy())
                status[place] = CHOSEN if np.isfinite(values[place].max()) else ALL_BANNED
    tokens = values.argmax(axis=1)
    drawn = np.flatnonzero((status == CHOSEN) & (sampling.kind.numpy()[rows] != GREEDY))
    if drawn.size:
        tokens[drawn] = draw(values[drawn], rows[drawn], keys[drawn], sampling)
    tokens[status != CHOSEN] = 0
    packed = None
    if logprobs >= 0:
        raw = np.where((status == NOT_FINITE)[:, None], np.float32(0), raw)  # these are packed and never read
        packed = torch.from_numpy(pack_logprobs(raw, tokens, logprobs))
    return Chosen(torch.from_numpy(tokens), torch.from_numpy(status), packed)


def score(logits: Tensor, targets: Tensor, k: int, sampling: SamplingRows, edits: EditRows) -> Tensor:
    """Packed logprobs of int64 `targets` [n] with k alternatives each: int32 [n, words]. See StepKernels.score."""
    values = logits.masked_fill(logits.isnan(), 0.0).numpy()  # of a row that fails, what is packed is not read
    return torch.from_numpy(pack_logprobs(values, targets.numpy(), k))


@np.errstate(over="ignore")  # a logit at float32's limit may become -inf: banned, which is what it was
def edit(line: NDArray[np.float32], row: int, outputs: int, edits: EditRows, token_ids: NDArray[np.int32]) -> None:
    """Edit a row of logits [vocab] in place, by the edits of a row of the batch that has so many outputs by then.

    The order is bias, repetition penalty (Keskar et al., CTRL, 2019) over prompt and output, presence and frequency
    penalties over output, ban of stop tokens.
    """
    biased, banned = int(edits.bias_count[row]), int(edits.ban_count[row])
    line[edits.bias_ids[row, :biased].numpy()] += edits.biases[row, :biased].numpy()
    repetition, presence, frequency = (
        np.float32(factors[row]) for factors in (edits.repetition, edits.presence, edits.frequency)
    )
    if repetition != 1 or presence != 0 or frequency != 0:
        prompt = int(edits.prompt[row])
        seen, which = np.unique(token_ids[: prompt + outputs], return_inverse=True)
        times = np.bincount(which[prompt:], minlength=len(seen)).astype(np.float32)
        value = line[seen]
        value = np.where(value < 0, value * repetition, value / repetition)
        line[seen] = value - (frequency * times + presence * (times > 0))
    if outputs < int(edits.min_tokens[row]):
        line[edits.ban_ids[row, :banned].numpy()] = -np.inf


def mark(watermark: Watermark, line: NDArray[np.float32], key: noise.Keys, outputs: NDArray[np.int32]) -> None:
    """Raise the logits [vocab] of green tokens, or replace the key [1] of the noise, in place."""
    if watermark.scheme == "green-list":
        watermark.raise_green(line, outputs)
    elif (marked := watermark.key_after(outputs)) is not None:
        key[:] = marked


def mask(line: NDArray[np.float32], words: NDArray[np.int32]) -> None:
    """Leave out the tokens of a row of logits [vocab] whose bits are not set, in place."""
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(line)]
    line[allowed == 0] = -np.inf


@np.errstate(divide="ignore", over="ignore")  # a filter that is off lies at log 0
def draw(logits: Logits, rows: NDArray[np.int32], keys: noise.Keys, sampling: SamplingRows) -> NDArray[np.int64]:
    """Draw a token for each row: the argmax of log p + noise over the tokens that its filters keep.

    `keys` [rows] are those of the noise.
    """
    vocab = logits.shape[1]
    temperature, top_p, min_p = (
        values.numpy()[rows][:, None] for values in (sampling.temperature, sampling.top_p, sampling.min_p)
    )
    top_k = sampling.top_k.numpy()[rows][:, None]
    below = logits - logits.max(axis=1, keepdims=True).astype(np.float64)
    log_p = below / temperature
    scores = log_p + noise.gumbel(noise.hash_tokens(np.arange(vocab), keys))
    of_filtered = np.flatnonzero(sampling.kind.numpy()[rows] >= FILTERED)
    if of_filtered.size:
        order = np.argsort(-logits[of_filtered], axis=1, kind="stable")  # best first, equals by ascending id
        ranked = np.take_along_axis(log_p[of_filtered], order, 1)
        k, share = np.where(top_k > 0, top_k, vocab)[of_filtered], top_p[of_filtered]
        in_reach = reach_best(below[of_filtered], sampling.top_n_sigma.numpy()[rows[of_filtered]][:, None])
        left = (np.arange(vocab) < k) & np.take_along_axis(in_reach, order, 1)
        weights = np.where(left, np.exp(ranked), 0.0)
        mass = np.cumsum(weights, axis=1)
        ahead = np.concatenate([np.zeros((len(mass), 1)), mass[:, :-1]], axis=1)
        kept = left & ((ahead < share * mass[:, -1:]) | (share >= 1))
        kept &= ranked >= np.log(min_p[of_filtered])
        kept[:, 0] = True
        marks = np.empty_like(kept)
        np.put_along_axis(marks, order, kept, 1)
        scores[of_filtered] = np.where(marks, scores[of_filtered], -np.inf)
    best: NDArray[np.int64] = scores.argmax(axis=1)
    return best


def reach_best(below: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Marks [rows, vocab] of the tokens that top_n_sigma keeps: Tang et al., Top-nσ: Not All Logits Are You Need, 2024.

    `below` are logits less the best one. Tokens are kept at most so many `deviations` [rows, 1] below it; 0: all.
    Banned tokens, whose logits are -inf, do not count to the standard deviation. The best token is one of the values,
    so the difference of squares loses few digits.
    """
    counted = np.isfinite(below)
    values, count = np.where(counted, below, 0.0), counted.sum(axis=1, keepdims=True)
    mean = values.sum(axis=1, keepdims=True) / count
    variance = (values * values).sum(axis=1, keepdims=True) / count - mean * mean
    kept: NDArray[np.bool_] = (below >= -deviations * np.sqrt(np.maximum(variance, 0.0))) | (deviations <= 0)
    return kept
