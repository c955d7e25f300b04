"""What `penstock reload` says about the KV cache of the new version, and where the threads of a server go then."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.cli.operate.reload import _warn_of_less
from penstock.cli.serving.processors import off_the_loop
from penstock.frontend import ServedModel, Serving
from penstock.observe.metrics import Metrics
from penstock.text import Tokenizer
from tests.frontend.scripted import ScriptedClient
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nothing can be kept off it")
async def test_threads_leave_the_processor_of_the_new_engine(tiny_checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoint("qwen3"))
    cpus = os.sched_getaffinity(0)
    one, two = sorted(cpus)[:2]

    def model(cpu: int | None) -> ServedModel:
        client = ScriptedClient(lambda request, choice: [1], vocab_size=tokenizer.vocab_size, eos=0)
        client.info = msgspec.structs.replace(client.info, cpu=cpu)
        return ServedModel(name="tiny", client=client, tokenizer=tokenizer, created=1)

    serving = Serving(model(one), Metrics(CollectorRegistry()))
    with off_the_loop(serving.versions):
        assert os.sched_getaffinity(0) == cpus - {one}
        for cpu in (two, None):
            serving.exchange(model(cpu))
            assert os.sched_getaffinity(0) == cpus - {cpu}
            while serving.versions.before is not None:
                await asyncio.sleep(0)
    assert os.sched_getaffinity(0) == cpus
    await serving.close()
