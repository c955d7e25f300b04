"""A device's runner with the Triton kernels, on a GPU or interpreted: its tokens are those of the CPU's runner."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.kernels.triton import attention
from penstock.messages import GenerateRequest, SamplingParams, TokenDelta, unpack_rows
from penstock.runtime.step_kernels import triton_step
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.models.serving import Server, make_device_runner, make_runner, outputs

PROMPTS = (tuple(range(5, 15)), (7, 9, 300))
OUTPUT = 3


def requests() -> list[GenerateRequest]:
    """A prompt in chunks that is scored, drawn from what filters keep, with every kind of edit; and a greedy one."""
    asked = SamplingParams(
        seed=3,
        max_tokens=OUTPUT,
        min_tokens=2,
        top_k=30,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        logit_bias={11: 2.0},
        eos_token_ids=(1, 2),
        logprobs=2,
        prompt_logprobs=1,
    )
    plain = SamplingParams(seed=0, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    sampling = (asked, plain)
    return [
        GenerateRequest(request_id=str(i), prompt_ids=prompt, sampling=each)
        for i, (prompt, each) in enumerate(zip(PROMPTS, sampling, strict=True))
    ]


def scores(deltas: list[TokenDelta]) -> list[float]:
    """All logprobs of the first request, the prompt's first."""
    own = [delta for delta in deltas if delta.request_id == "0"]
    rows = [*unpack_rows(b"".join(delta.prompt_logprobs for delta in own), 1)]
    rows += unpack_rows(b"".join(delta.logprobs for delta in own), 2)
    return [number for row in rows for number in (row.logprob, *(logprob for _, logprob in row.top))]


@pytest.mark.parametrize("variant", ["qwen3"] if DEVICE.type == "cpu" else ["qwen3", "gemma3", "qwen2_moe"])
def test_tokens_are_those_of_the_cpu(
    variant: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "SEGMENTS", 2)  # programs are interpreted one after the other
    folder = tiny_checkpoint(variant)
    want = Server(make_runner(folder), budget=6, max_num_seqs=2).run(requests())
    runner = make_device_runner(
        folder, device=DEVICE, step_kernels=triton_step(), platform=GPU, max_num_seqs=2, max_model_len=64
    )
    got = Server(runner, budget=6, max_num_seqs=2).run(requests())
    assert outputs(got) == outputs(want)
    assert scores(got) == pytest.approx(scores(want), abs=1e-4)
    assert len(scores(got)) == 2 * (len(PROMPTS[0]) - 1) + 3 * OUTPUT


def test_drafts_change_no_bit_with_deterministic(tiny_checkpoint: Callable[..., Path]) -> None:
    """Of a greedy and a sampled request; a draft of each is wrong."""
    folder, drafts = tiny_checkpoint("qwen3"), {"speculation": "ngram", "num_speculative_tokens": 6}
    wanted = [
        replace(each, sampling=replace(each.sampling, max_tokens=11, prompt_logprobs=None, logprobs=2))
        for each in requests()
    ]
    given = []
    for how in ({}, drafts):
        runner = make_device_runner(
            folder,
            device=DEVICE,
            step_kernels=triton_step(),
            platform=GPU,
            depth=1,
            max_num_seqs=2,
            max_model_len=64,
            deterministic=True,
            **how,
        )
        server = Server(runner, max_num_seqs=2, speculation="ngram" if how else "off", drafts=6 if how else 0)
        deltas = server.run(wanted)
        given.append((outputs(deltas), [b"".join(d.logprobs for d in deltas if d.request_id == i) for i in "01"]))
        tokens = given[0][0]
        wanted = [
            replace(each, prediction_ids=tuple(t ^ (i == 5) for i, t in enumerate(tokens[each.request_id, 0])))
            for each in wanted
        ]
        assert runner.capacity.exact_drafts
        stats = server.scheduler.stats()
    assert given[1] == given[0]
    assert stats.draft_tokens > stats.accepted_tokens > 3
