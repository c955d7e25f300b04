"""Quantised runners from a dense checkpoint: memory as planned, requests served, and a cache root of their own."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.config.weights import weights_bytes
from penstock.families import load_spec, model_facts
from penstock.kernels import CannotQuantize, Platform, detect_platform
from penstock.messages import GenerateRequest, SamplingParams, TokenDelta
from penstock.runtime.loading import cpu as load
from penstock.runtime.loading.load import load_runner
from penstock.schedule import Scheduler, SchedulerConfig
from tests.checkpoints import TYPICAL, VARIANTS
from tests.models.serving import outputs
from tests.often import often

Checkpoint = Callable[..., Path]
FORMS = [("none", 32), ("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)]

pytestmark = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")


def config(folder: Path, **changes: object) -> EngineConfig:
    base = EngineConfig(
        model=str(folder), name="tiny", max_model_len=256, max_num_seqs=4, kv_cache_bytes=8 << 20, threads=1
    )
    return replace(base, **changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", often(VARIANTS, TYPICAL))
def test_weights_take_what_was_planned(variant: str, dtype: str, tiny_checkpoint: Checkpoint) -> None:
    """Odd vocabulary, tied and untied heads, biases, norms of heads: to the byte."""
    folder = tiny_checkpoint(variant)
    facts = model_facts(load_spec(folder)).for_kernels(detect_platform().isa)
    sizes = []
    for quantization, group in FORMS:
        wanted = config(folder, dtype=dtype, quantization=quantization, quantization_group=group)
        runner = load_runner(wanted, progress=False)
        sizes.append(next(row.bytes for row in runner.capacity.memory if row.name == "weights"))
        assert sizes[-1] == weights_bytes(facts, wanted)
        runner.close()
    assert sizes[0] > sizes[1] > sizes[2]


def serve(
    wanted: EngineConfig, waves: Iterable[Sequence[GenerateRequest]], budget: int
) -> list[dict[tuple[str, int], list[int]]]:
    """Of each wave, output ids by (request id, choice), in steps of at most `budget` tokens."""
    runner = load_runner(wanted, progress=False)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=256)
    scheduler = Scheduler(limits, runner.capacity)
    served = []
    for wave in waves:
        for request in wave:
            scheduler.add(request, 0.0)
        deltas: list[TokenDelta] = []
        while (plan := scheduler.plan(0.0)) is not None:
            deltas += scheduler.apply(runner.execute(plan), 0.0)
        served.append(outputs(deltas))
    return served


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_requests_are_served(quantization: str, tiny_checkpoint: Checkpoint) -> None:
    """Tokens do not depend on other requests or on how a prompt is split into chunks."""
    wanted = config(tiny_checkpoint("qwen2"), quantization=quantization)
    sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(range(3 + i, 40 + 2 * i)), sampling=sampling)
        for i in range(4)
    ]
    (together,) = serve(wanted, [requests], 29)
    alone = serve(wanted, [[request] for request in requests], 512)
    assert together == {key: tokens for each in alone for key, tokens in each.items()}
    assert len(together) == 4 and {len(tokens) for tokens in together.values()} == {12}


def test_the_cache_tells_quantised_weights_apart(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("qwen3")
    configs = [config(folder, quantization=q, quantization_group=g) for q, g in FORMS]
    found = [load_runner(each, progress=False).capacity.identity for each in configs]
    assert len({each.weights for each in found}) == 1
    assert len({each.numerics for each in found}) == len(FORMS)


def test_the_log_names_the_form(tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.runtime"):
        load_runner(config(tiny_checkpoint("qwen2"), quantization="int4"), progress=False)
    assert "weights in int4 in groups of 32, and int8" in caplog.text


def test_without_native_kernels_nothing_is_read(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "detect_platform", lambda device: Platform(device, "AVX2", False))
    monkeypatch.setattr(load, "load_parameters", lambda *arguments, **options: pytest.fail("read"))
    with pytest.raises(CannotQuantize, match="set --quantization none"):
        load_runner(config(tiny_checkpoint("qwen2"), quantization="int8"), progress=False)
