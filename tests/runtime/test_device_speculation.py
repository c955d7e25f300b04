"""Speculation on a device with a memory of its own changes no token: greedy, sampled, by grammars, with stop strings
and preemption. The device is a MirrorDevice. Its decode steps are captured, steps with drafts are not."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from torch import Tensor

from penstock.kernels.batch_arrays import BATCH_ROW, CONTEXT, DRAFTS, LOGITS, BatchRows, StepArrays
from penstock.messages import GenerateRequest, unpack_rows
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import ReferenceStep
from tests.invariance.test_batch_invariance import tiny_vocab
from tests.invariance.test_grammar_speculation import repeating
from tests.invariance.test_speculation import asked
from tests.models.serving import Server, make_device_runner
from tests.runtime.byte_tokens import grammars
from tests.runtime.mirror_device import MirrorAttention
from tests.schedule.invariants import check_scheduler

Checkpoint = Callable[..., Path]
MOST = 8  # drafts of a step
SCARCE = {"blocks": 24, "budget": 64}


class Output(NamedTuple):
    tokens: tuple[int, ...]
    reason: str | None
    scores: tuple[float, ...] = ()  # logprobs of the tokens


Outputs = dict[str, Output]
Stops = dict[str, tuple[int, ...]]


def runner_of(folder: Path, *, drafts: bool = True, **settings: Any) -> ModelRunner:
    """A runner that verifies drafts, or one with two plans outstanding."""
    how = {"depth": 1, "speculation": "suffix", "num_speculative_tokens": MOST} if drafts else {}
    runner = make_device_runner(folder, **how, **settings)
    runner.use_grammars(grammars())
    return runner


def wave(variant: str) -> list[GenerateRequest]:
    plain = [replace(each, request_id=f"plain {each.request_id}") for each in asked(tiny_vocab(variant), 28)]
    return plain + [repeating(seed) for seed in range(12)]


def guessing(wanted: Iterable[GenerateRequest], known: Outputs) -> list[GenerateRequest]:
    """The requests with predictions of which every ninth token is wrong."""
    return [
        replace(
            each,
            prediction_ids=tuple(1 if i % 9 == 8 else t for i, t in enumerate(known[each.request_id].tokens)),
        )
        for each in wanted
    ]


def serve(server: Server, wanted: list[GenerateRequest], stops: Stops) -> Outputs:
    """Runs all requests. One in `stops` ends before these two tokens, as soon as a client has them."""
    server.runner.forget()  # those of another server
    found = {request.request_id: Output((), None) for request in wanted}
    logprobs = {request.request_id: request.sampling.logprobs for request in wanted}
    for request in wanted:
        server.scheduler.add(request, 0.0)
    while (deltas := server.step()) is not None:
        for delta in deltas:
            assert not delta.error, delta.error
            name, had = delta.request_id, found[delta.request_id]
            rows = unpack_rows(delta.logprobs, logprobs[name] or 0)
            scores = (*had.scores, *(row.logprob for row in rows))
            found[name] = had = Output((*had.tokens, *delta.token_ids), delta.finish_reason, scores)
            pairs = list(zip(had.tokens, had.tokens[1:], strict=False))
            if had.reason is None and stops.get(name) in pairs:
                kept = pairs.index(stops[name])
                server.scheduler.finish(name, 0, "stop", kept, 0.0)
                found[name] = Output(had.tokens[:kept], "stop", scores[:kept])
    check_scheduler(server.scheduler)
    return found


def assert_same(got: Outputs, want: Outputs) -> None:
    assert {name: each[:2] for name, each in got.items()} == {name: each[:2] for name, each in want.items()}
    for name, each in want.items():
        assert got[name].scores == pytest.approx(each.scores, abs=1e-4)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_no_token_changes(variant: str, tiny_checkpoint: Checkpoint) -> None:
    folder, wanted = tiny_checkpoint(variant), wave(variant)
    ahead, runner = runner_of(folder, drafts=False), runner_of(folder)
    assert (ahead.capacity.depth, runner.capacity.depth) == (2, 1)
    whole = serve(Server(ahead), wanted, {})
    stops = {name: each.tokens[9:11] for name, each in list(whole.items())[::5] if len(each.tokens) > 11}
    plain = serve(Server(ahead), wanted, stops)
    assert len(stops) > 3 and all(len(plain[name].tokens) < len(whole[name].tokens) for name in stops)
    for limits, asked_for in (({}, wanted), (SCARCE, guessing(wanted, whole))):
        server = Server(runner, speculation="suffix", drafts=MOST, **limits)
        assert_same(serve(server, asked_for, stops), plain)
        stats = server.scheduler.stats()
        assert stats.draft_tokens > stats.accepted_tokens > (20 if asked_for is wanted else 200)
        assert stats.preemptions > 0 or not limits


class AcceptsEveryDraft(ReferenceStep):
    """Does not compare drafts with what is sampled."""

    def advance(self, state: BatchRows, step: StepArrays, sequences: int, tokens: Tensor, outputs: Tensor) -> None:
        sampled = tokens.clone()
        for unit in step.units[:, :sequences].T.tolist():
            row, first, drafts = unit[BATCH_ROW], unit[LOGITS], unit[DRAFTS]
            if row >= 0 and first >= 0:
                known = unit[CONTEXT] - drafts
                sampled[first : first + drafts] = state.token_ids[row, known : known + drafts].long()
        super().advance(state, step, sequences, sampled, outputs)


def test_a_draft_that_is_accepted_wrongly_is_noticed(tiny_checkpoint: Checkpoint) -> None:
    folder, wanted = tiny_checkpoint("qwen3"), asked(tiny_vocab("qwen3"), 8)
    whole = serve(Server(runner_of(folder, drafts=False)), wanted, {})
    for kernels in (ReferenceStep(), AcceptsEveryDraft()):
        runner = runner_of(folder, step_kernels=kernels, attention=MirrorAttention())
        got = serve(Server(runner, speculation="suffix", drafts=MOST), guessing(wanted, whole), {})
        right = [got[name].tokens == each.tokens for name, each in whole.items()]
        assert all(right) if type(kernels) is ReferenceStep else not any(right)
