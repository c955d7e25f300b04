"""The tokens of a request do not depend on who shares the batch, on chunking, on a prefix hit, on preemption or on a
restart in the middle. Real scheduler, real runner, fp32.

torch's GEMMs choose their order of summation by the number of rows, so logits may differ in their last bits. Where two
runs part, the two best candidates, noise included, must lie within 1e-4 there; and that may happen at 1% of the
positions at most.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from penstock.config import EngineConfig
from penstock.messages import GenerateRequest, KVGroup, SamplingParams
from penstock.runtime.loading.load import load_runner
from penstock.schedule import Scheduler, SchedulerConfig
from tests.checkpoints import tiny_model, write_tiny_checkpoint
from tests.runtime.sampling.sampler_oracle import is_close
from tests.schedule.invariants import check_scheduler

SEEDS = 100
OUTPUT = 20
NEAR_TIE = 1e-4
Tokens = dict[str, list[int]]


def requests(variant: str) -> list[GenerateRequest]:
    """One request for each seed: greedy for the even, sampled in assorted ways for the odd."""
    vocab = tiny_vocab(variant)
    made = []
    for seed in range(SEEDS):
        source = random.Random(seed)
        prompt = tuple(source.randrange(vocab) for _ in range(source.randint(3, 75)))
        ways = (
            {"temperature": 1.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.1},
            {"temperature": 0.7, "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        )
        how = ways[seed // 2 % len(ways)] if seed % 2 else {"temperature": 0.0}
        sampling = SamplingParams(seed=seed, max_tokens=OUTPUT, ignore_eos=True, **how)
        made.append(GenerateRequest(request_id=str(seed), prompt_ids=prompt, sampling=sampling))
    return made


def tiny_vocab(variant: str) -> int:
    return int(tiny_model(variant).config.vocab_size)


class Machine:
    """A runner for one checkpoint, and what its last run had of preemptions, cached tokens and packed logprobs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"dtype": "float32", **settings}
        self.logprobs: dict[str, list[bytes]] = {}
        self.preemptions = 0
        self.cached = 0
        self.accepted = 0  # drafts

    def run(
        self,
        waves: Sequence[Sequence[GenerateRequest]],
        *,
        seqs: int = 32,
        budget: int = 512,
        blocks: int = 1024,
        caching: bool = False,
        threads: int = 1,
        speculation: Literal["off", "ngram", "suffix"] = "off",
    ) -> Tokens:
        """Output ids of the last wave's requests. A wave begins when the one before it is done. With speculation, the
        scheduler believes that drafts cost little time."""
        most = 7 if speculation != "off" else 0
        config = EngineConfig(
            model=str(self.folder), name="tiny", max_model_len=128, max_num_seqs=seqs, threads=threads,
            max_num_batched_tokens=budget, kv_cache_bytes=16 << 20, enable_prefix_caching=caching,
            speculation=speculation, num_speculative_tokens=most, **self.settings,
        )  # fmt: skip
        runner = load_runner(config, progress=False)
        groups = tuple(KVGroup(min(blocks, group.num_blocks), group.window) for group in runner.capacity.groups)
        capacity = msgspec.structs.replace(runner.capacity, groups=groups)
        limits = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=128,
            enable_prefix_caching=caching,
            speculation=speculation,
            num_speculative_tokens=most,
            max_step_drafts=config.max_step_drafts,
        )
        scheduler = Scheduler(limits, capacity)
        now = 0.0
        tokens: Tokens = {}
        for wave in waves:
            tokens = {request.request_id: list(request.output_ids) for request in wave}
            self.logprobs = {request.request_id: [] for request in wave}
            for request in wave:
                scheduler.add(request, 0.0)
            while (plan := scheduler.plan(now)) is not None:
                result = runner.execute(plan)
                assert result is not None
                now += 0.05 + 0.0005 * sum(work.drafts for work in plan.work)
                for delta in scheduler.apply(result, now):
                    assert not delta.error
                    assert delta.offset == len(tokens[delta.request_id])
                    tokens[delta.request_id] += delta.token_ids
                    size = len(delta.logprobs) // max(len(delta.token_ids), 1)
                    if size:
                        rows = [delta.logprobs[i : i + size] for i in range(0, len(delta.logprobs), size)]
                        self.logprobs[delta.request_id] += rows
            check_scheduler(scheduler)
        stats = scheduler.stats()
        self.preemptions, self.cached, self.accepted = stats.preemptions, stats.prefix_hits, stats.accepted_tokens
        runner.close()
        return tokens


def renamed(wave: Sequence[GenerateRequest], prefix: str) -> list[GenerateRequest]:
    return [msgspec.structs.replace(request, request_id=prefix + request.request_id) for request in wave]


def resumed(wave: Sequence[GenerateRequest], tokens: Tokens) -> list[GenerateRequest]:
    """The same requests from somewhere in their middle."""
    return [
        msgspec.structs.replace(
            request, output_ids=tuple(tokens[request.request_id][: 1 + int(request.request_id) % (OUTPUT - 2)])
        )
        for request in wave
    ]


class Judge:
    """Counts the positions at which two runs part, each of which must be a near-tie by transformers' logits."""

    def __init__(self, variant: str) -> None:
        self.model = tiny_model(variant)
        self.ties = 0

    def compare(self, wave: Sequence[GenerateRequest], expected: Tokens, got: Tokens) -> None:
        for request in wave:
            right, ours = expected[request.request_id], got[request.request_id]
            assert len(right) == len(ours) == OUTPUT
            part = next((i for i in range(OUTPUT) if right[i] != ours[i]), None)
            if part is not None:
                assert self.near_tie(request, right[:part]), f"request {request.request_id} parts at output {part}"
                self.ties += 1

    def near_tie(self, request: GenerateRequest, output: list[int]) -> bool:
        """Whether rounding may decide the token after `output`."""
        ids = torch.tensor([[*request.prompt_ids, *output]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, -1].double().numpy()
        return is_close(logits, request.sampling, 0, request.prompt_ids, output, NEAR_TIE)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "mixtral"])
def test_tokens_do_not_depend_on_company(variant: str, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant))
    judge = Judge(variant)
    wave = requests(variant)
    alone = machine.run([wave], seqs=1)  # one after the other: no two ever share a step

    judge.compare(wave, alone, machine.run([wave], seqs=32))
    judge.compare(wave, alone, machine.run([wave], seqs=16, budget=16))

    got: Tokens = {}
    for part in (wave[i : i + 20] for i in range(0, SEEDS, 20)):  # as many as the cache can keep
        got |= machine.run([renamed(part, "warm-"), part], caching=True)
        assert machine.cached > 20 * 16
    judge.compare(wave, alone, got)

    got = machine.run([wave], blocks=24)
    assert machine.preemptions > 20
    judge.compare(wave, alone, got)

    judge.compare(wave, alone, machine.run([resumed(wave, alone)]))
    assert judge.ties <= 0.01 * 5 * SEEDS * OUTPUT
