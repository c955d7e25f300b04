"""With the native kernels a request gives the same tokens and logprobs to the last bit, whoever shares its batch,
however its prompt was cut, after a prefix hit, a preemption or a restart in the middle, on any number of threads."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernels.native.loader import instruction_sets
from penstock.messages import GenerateRequest
from tests.checkpoints import write_tiny_checkpoint
from tests.invariance.test_batch_invariance import Machine, renamed, requests, resumed

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


def with_logprobs(wave: list[GenerateRequest]) -> list[GenerateRequest]:
    return [msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, logprobs=3)) for r in wave]


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen2_moe"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_the_request_counts(way: str, variant: str, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant), **WAYS[way])
    wave = with_logprobs(requests(variant)[:24])
    alone = machine.run([wave], seqs=1)
    expected = machine.logprobs
    assert all(expected.values())

    def check(**how: Any) -> None:
        waves = how.pop("waves", [wave])
        assert machine.run(waves, **how) == alone
        assert machine.logprobs == expected

    check(seqs=24)
    check(seqs=24, threads=2)
    check(seqs=24, budget=32)  # prompts in chunks, at whatever border the others leave
    check(seqs=24, blocks=30)
    assert machine.preemptions > 0
    check(waves=[renamed(wave, "warm-"), wave], seqs=24, caching=True)
    assert machine.cached > 0
    later = resumed(wave, alone)
    assert machine.run([later], seqs=24) == alone
    skipped = {request.request_id: len(request.output_ids) for request in later}
    assert machine.logprobs == {name: packed[skipped[name] :] for name, packed in expected.items()}
