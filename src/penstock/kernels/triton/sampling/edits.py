"""Edits logits before a token is chosen: biases, penalties, banned stop tokens, and the masks of grammars.

Penalties count a row's tokens anew in every step. The token ids are on the device anyway, and counts that are kept
between steps would take a vector of the vocabulary's size per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.batch_arrays import EditRows, MaskRows

ROWS = 32  # rows edited per launch: bounds the memory for counts, [ROWS, vocab]
CHUNK = 2048  # tokens that a program handles at once
MASKED = 4096  # tokens that a program masks
PROMPT = 1 << 30  # this bit of a token's count is set when the prompt contains the token


def edit(
    logits: Tensor, edited: Tensor, rows: Tensor, outputs: Tensor, parameters: EditRows, token_ids: Tensor
) -> None:
    """Edits the rows int32 `edited` [m] of fp32 logits [n, vocab] in place.

    int32 [n]: `rows` are the rows of the batch; `outputs` is the number of output tokens before each row of logits,
    drafts included. int32 `token_ids` [rows of the batch, longest] holds prompts, then outputs, then drafts.
    """
    vocab = logits.shape[1]
    for part in edited.split(ROWS):
        counts = torch.zeros(len(part), vocab, dtype=torch.int32, device=logits.device)
        _edit[(len(part),)](
            logits,
            part,
            rows,
            parameters.repetition,
            parameters.presence,
            parameters.frequency,
            parameters.bias_count,
            parameters.bias_ids,
            parameters.biases,
            parameters.ban_count,
            parameters.ban_ids,
            parameters.min_tokens,
            token_ids,
            parameters.prompt,
            outputs,
            counts,
            vocab,
            token_ids.shape[1],
            parameters.bias_ids.shape[1],
            parameters.ban_ids.shape[1],
            PROMPT=PROMPT,
            CHUNK=CHUNK,
            num_warps=8,
        )


def mask(logits: Tensor, masks: MaskRows) -> None:
    """Writes -inf to fp32 logits [n, vocab] in place where the masks of the rows leave tokens out."""
    count, vocab = logits.shape
    _mask[(count, triton.cdiv(vocab, MASKED))](
        logits, masks.lines, masks.words, vocab, masks.words.shape[1], CHUNK=MASKED, num_warps=4
    )


@triton.jit
def _mask(logits, lines, words, vocab, stride, CHUNK: tl.constexpr):
    """Each program masks a part of one row."""
    nth = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + nth).to(tl.int64)
    if line >= 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocab
        word = tl.load(words + line * stride + token // 32, mask=inside, other=0)
        left_out = ((word >> (token % 32)) & 1) == 0
        tl.store(logits + nth * vocab + token, float("-inf"), mask=inside & left_out)


@triton.jit(do_not_specialize=["most_tokens", "most_biases", "most_bans"])  # biases and bans grow while serving
def _edit(
    logits,
    edited,
    rows,
    repetitions,
    presences,
    frequencies,
    bias_counts,
    bias_ids,
    biases,
    ban_counts,
    ban_ids,
    min_tokens,
    token_ids,
    prompts,
    outputs,
    counts,
    vocab,
    most_tokens,
    most_biases,
    most_bans,
    PROMPT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each program edits one row."""
    nth = tl.load(edited + tl.program_id(0)).to(tl.int64)
    row = tl.load(rows + nth).to(tl.int64)
    logits += nth * vocab
    lane = tl.arange(0, CHUNK)
    done = tl.load(outputs + nth)

    count = tl.load(bias_counts + row)
    for start in range(0, count, CHUNK):
        inside = start + lane < count
        token = tl.load(bias_ids + row * most_biases + start + lane, mask=inside, other=0)
        bias = tl.load(biases + row * most_biases + start + lane, mask=inside, other=0.0)
        tl.store(logits + token, tl.load(logits + token, mask=inside, other=0.0) + bias, mask=inside)

    repetition = tl.load(repetitions + row)
    presence = tl.load(presences + row)
    frequency = tl.load(frequencies + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = counts + tl.program_id(0).to(tl.int64) * vocab
        prompt = tl.load(prompts + row)
        for start in range(0, prompt + done, CHUNK):
            at = start + lane
            inside = at < prompt + done
            token = tl.load(token_ids + row * most_tokens + at, mask=inside, other=0)
            tl.atomic_or(seen + token, tl.where(at < prompt, PROMPT, 0), mask=inside & (at < prompt), sem="relaxed")
            tl.atomic_add(seen + token, 1, mask=inside & (at >= prompt), sem="relaxed")
        tl.debug_barrier()  # other threads read the biases and counts that these threads wrote
        for start in range(0, vocab, CHUNK):
            inside = start + lane < vocab
            value = tl.load(logits + start + lane, mask=inside, other=0.0)
            tally = tl.load(seen + start + lane, mask=inside, other=0)
            times = (tally & (PROMPT - 1)).to(tl.float32)
            value = tl.where(value < 0.0, value * repetition, value / repetition)
            value -= frequency * times + tl.where(times > 0.0, presence, 0.0)
            tl.store(logits + start + lane, value, mask=inside & (tally != 0))

    if done < tl.load(min_tokens + row):
        tl.debug_barrier()
        banned = tl.load(ban_counts + row)
        for start in range(0, banned, CHUNK):
            inside = start + lane < banned
            token = tl.load(ban_ids + row * most_bans + start + lane, mask=inside, other=0)
            tl.store(logits + token, float("-inf"), mask=inside)
