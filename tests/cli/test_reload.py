"""What `penstock reload` says about the KV cache of the new version."""

import logging

import msgspec
import pytest

from penstock.cli.operate.reload import _warn_of_less
from tests.observe.test_metrics import INFO


@pytest.mark.parametrize(
    ("tokens", "sequences", "warns"),
    [(16_000, 16, False), (12_000, 16, True), (12_000, 12, False), (20_000, 32, False), (9_000, 12, True)],
)
def test_a_smaller_cache_is_told_if_sequences_may_need_more(
    caplog: pytest.LogCaptureFixture, tokens: int, sequences: int, warns: bool
) -> None:
    sizes = {"max_model_len": 1000, "block_size": 100}
    old = msgspec.structs.replace(INFO, max_num_seqs=16, num_blocks=(161,), **sizes)
    new = msgspec.structs.replace(INFO, max_num_seqs=sequences, num_blocks=(tokens // 100 + 1,), **sizes)
    with caplog.at_level(logging.WARNING):
        _warn_of_less(old, new)
    assert bool(caplog.records) == warns
