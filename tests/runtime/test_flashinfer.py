"""A device runner with FlashInfer, which plans on the host, gives the tokens of the other attention kernel."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels.flashinfer import FlashInferAttention
from penstock.runtime.step_kernels import ReferenceStep
from tests.kernels.test_flashinfer import Wrappers
from tests.models.serving import Server, make_device_runner
from tests.runtime.mirror_device import MirrorAttention
from tests.runtime.test_device_runner import SCENARIOS, assert_same, renamed, wave

Checkpoint = Callable[..., Path]
GROUPS = {"qwen3": 1, "gemma3": 2}  # of KV


@pytest.mark.parametrize(
    ("variant", "eager", "scenario"),
    [
        ("qwen3", False, "preempted"),
        ("qwen3", True, "in chunks"),
        ("gemma3", False, "in chunks"),
        ("gemma3", False, "from the cache"),
    ],
)
def test_tokens_are_those_of_the_other_attention(
    variant: str, eager: bool, scenario: str, tiny_checkpoint: Checkpoint
) -> None:
    folder, how, asked = tiny_checkpoint(variant, dtype="bfloat16"), SCENARIOS[scenario], wave()
    settings = {"dtype": "bfloat16", "enforce_eager": eager, "step_kernels": ReferenceStep()}
    wrappers = Wrappers()
    planned = FlashInferAttention(MirrorAttention(), wrappers)
    plain = Server(make_device_runner(folder, attention=MirrorAttention(), **settings), **how)
    server = Server(make_device_runner(folder, attention=planned, **settings), **how)
    assert_same(server.run(asked), plain.run(asked))
    if scenario == "from the cache":
        again = renamed(asked, "again-")
        assert_same(server.run(again), plain.run(again))
        assert server.scheduler.stats().prefix_hits > 0
    assert sum(wrapper.plans for wrapper in wrappers.made) > 5
    assert len(wrappers.made) <= 3 * GROUPS[variant]  # two plans outstanding, and one that is being made
