"""Native attention gives a query the same bits whichever queries are beside it.

It runs with the best instruction set of this processor; test_emulated.py runs it with the others.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.session import native_session
from penstock.messages import Window

SIZE, CONTEXT, KV_HEADS, GROUP, HEAD_DIM = 16, 1039, 1, 3, 48
LAST = 21  # queries, of which some see a third segment of the cache and some end within a page


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_is_the_same_alone_and_in_any_chunk(dtype: torch.dtype, window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    blocks = -(-CONTEXT // SIZE)
    pages = torch.randn((blocks + 1, 2, KV_HEADS, SIZE, HEAD_DIM), generator=generator).to(dtype)
    query = torch.randn((LAST, KV_HEADS * GROUP, HEAD_DIM), generator=generator).to(dtype)
    attention = NativeAttention(native_session())
    keys, values = attention.arrange(pages[:, 0], keys=True), attention.arrange(pages[:, 1], keys=False)
    table = np.arange(blocks)[::-1].copy()[None] + 1

    def attend(first: int, end: int) -> Tensor:
        """Queries [first, end), before later ones were written."""
        context = CONTEXT - LAST + end
        written = values.clone()
        if inside := context % SIZE:  # what else the last page holds is anything
            per_word = 4 // dtype.itemsize
            page = written[table[0, context // SIZE]].view(KV_HEADS, -1, HEAD_DIM, per_word)
            tokens = torch.arange(SIZE).view(-1, 1, per_word)
            page.masked_fill_(tokens >= inside, torch.nan)
        batch = AttentionBatch(SIZE, Window(window), np.array([0, end - first]), np.array([context]), table)
        return attention(query[first:end].contiguous(), keys, written, attention.prepare(batch, keys), HEAD_DIM**-0.5)

    together = attend(0, LAST)
    assert together.isfinite().all()
    for borders in ((0, 1, 2, 6, 16, LAST), (0, 7, 8, 20, LAST)):
        chunks = [attend(first, end) for first, end in pairwise(borders)]
        assert torch.equal(torch.cat(chunks), together)
