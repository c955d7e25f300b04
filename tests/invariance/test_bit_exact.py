"""With the native kernels a request gives the same tokens and logprobs to the last bit, whoever shares its batch,
however its prompt was cut, after a prefix hit, a preemption or a restart in the middle, on any number of threads."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernels.native.loader import instruction_sets
from penstock.messages import GenerateRequest
from tests.checkpoints import write_tiny_checkpoint
from tests.gguf_models import write_gguf
from tests.invariance.test_batch_invariance import Machine, Tokens, renamed, requests, resumed
from tests.often import often
from tests.smollm2 import smollm2

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}
MIXED = {"attn_q": "Q8_0", "attn_v": "Q5_1", "attn_output": "Q4_1", "ffn_up": "Q5_0", "ffn_up_exps": "IQ4_NL"}
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


def with_logprobs(wave: list[GenerateRequest]) -> list[GenerateRequest]:
    return [msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, logprobs=3)) for r in wave]


def predicted(wave: list[GenerateRequest], tokens: Tokens) -> list[GenerateRequest]:
    """The same requests with predictions in which every sixth token is wrong."""
    return [
        msgspec.structs.replace(
            request,
            prediction_ids=tuple(1 if i % 6 == 5 else token for i, token in enumerate(tokens[request.request_id])),
        )
        for request in wave
    ]


class Alone:
    """What requests give one after the other, to which other ways of running them are compared."""

    def __init__(self, machine: Machine, wave: list[GenerateRequest]) -> None:
        self.machine, self.wave = machine, wave
        self.tokens = machine.run([wave], seqs=1)
        self._logprobs = machine.logprobs
        assert all(self._logprobs.values())

    def check(self, waves: list[list[GenerateRequest]] | None = None, **how: Any) -> None:
        assert self.machine.run(waves or [self.wave], **how) == self.tokens
        assert self.machine.logprobs == self._logprobs

    def check_resumed(self, **how: Any) -> None:
        later = resumed(self.wave, self.tokens)
        assert self.machine.run([later], **how) == self.tokens
        skipped = {request.request_id: len(request.output_ids) for request in later}
        assert self.machine.logprobs == {name: packed[skipped[name] :] for name, packed in self._logprobs.items()}


def check_company(alone: Alone, *, few_blocks: int, threads: int = 1) -> None:
    """In a batch, in chunks, preempted (with `few_blocks`) and resumed."""
    alone.check(seqs=24, threads=threads)
    alone.check(seqs=24, threads=threads, budget=32)  # prompts in chunks, at whatever border the others leave
    alone.check(seqs=24, threads=threads, blocks=few_blocks)
    assert alone.machine.preemptions > 0
    alone.check_resumed(seqs=24, threads=threads)


def check_ways(machine: Machine, wave: list[GenerateRequest], *, few_blocks: int, budget: int = 48) -> None:
    """All ways, for a model whose sequences can share blocks and take drafts."""
    alone = Alone(machine, wave)
    check_company(alone, few_blocks=few_blocks)
    alone.check(seqs=24, threads=2)
    drafted = [predicted(wave, alone.tokens)]
    alone.check(drafted, seqs=24, speculation="ngram")
    assert machine.accepted > 0
    alone.check(drafted, seqs=24, speculation="suffix", blocks=few_blocks, budget=budget)
    assert machine.accepted > 0 and machine.preemptions > 0
    alone.check([renamed(wave, "warm-"), wave], seqs=24, caching=True)
    assert machine.cached > 0


MODELS = [(way, variant) for way in WAYS for variant in ("qwen3", "gemma3", "qwen2_moe")]
FEW = [("fp32", "gemma3"), ("bf16", "qwen3"), ("bf16", "qwen2_moe"), ("int8", "qwen2_moe"), ("int4", "gemma3")]


@pytest.mark.parametrize(("way", "variant"), often(MODELS, FEW))
def test_nothing_but_the_request_counts(way: str, variant: str, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant), **WAYS[way])
    check_ways(machine, with_logprobs(requests(variant)[:24]), few_blocks=30)


@pytest.mark.parametrize("way", often(["fp32", "bf16", "int8"], ["bf16", "int8"]))
def test_nothing_else_counts_over_latents(way: str, tmp_path: Path) -> None:
    how = {**WAYS[way], "kv_cache_dtype": "auto"}
    machine = Machine(write_tiny_checkpoint("deepseek_v3", tmp_path / "model"), **how)
    check_ways(machine, with_logprobs(requests("deepseek_v3")[:24]), few_blocks=30)


STATES = [
    (variant, way)
    for variant in ("qwen3_next", "qwen3_5", "granite_4_hybrid", "mamba2", "nemotron_h")
    for way in ("fp32", "bf16", "int8")
]
OFTEN = {("qwen3_next", "bf16"), ("qwen3_5", "int8"), ("mamba2", "fp32"), ("nemotron_h", "bf16")}


def served_alone(variant: str, way: str, folder: Path) -> Alone:
    machine = Machine(write_tiny_checkpoint(variant, folder), **{**WAYS[way], "kv_cache_dtype": "auto"})
    return Alone(machine, with_logprobs(requests(variant)[:16]))


@pytest.mark.parametrize(("variant", "way"), often(STATES, OFTEN))
def test_nothing_else_counts_over_states(variant: str, way: str, tmp_path: Path) -> None:
    """Such models have neither prefix hits nor drafts."""
    alone = served_alone(variant, way, tmp_path / variant)
    check_company(alone, few_blocks=30)
    alone.check(seqs=24, threads=2)


@pytest.mark.rare
@pytest.mark.parametrize(("variant", "way"), STATES)
def test_nothing_else_counts_over_states_on_two_threads(variant: str, way: str, tmp_path: Path) -> None:
    alone = served_alone(variant, way, tmp_path / variant)
    alone.check(seqs=1, threads=2)
    check_company(alone, few_blocks=30, threads=2)


@pytest.mark.parametrize(
    ("variant", "way"), [("llama4_chunks", "fp32"), ("llama4_chunks", "bf16"), ("ministral3_far", "fp32")]
)
def test_nothing_else_counts_over_chunks_and_temperatures(variant: str, way: str, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant), **WAYS[way])
    check_ways(machine, with_logprobs(requests(variant)[:24]), few_blocks=30)


@pytest.mark.rare
@pytest.mark.parametrize(
    "variant",
    [
        "gemma2",
        "gpt2",
        "gpt_neox",
        "cohere",
        "cohere_plus",
        "cohere2",
        "glm",
        "olmo3",
        "opt",
        "phi3",  # a window in every layer
        "smollm3_window",
        "starcoder2",
        "starcoder2_window",
        "granite",
        "falcon_grouped",
        "glm4_moe_grouped",
        "phi3_long",
        "gpt_oss",
        "llama4",
        "gemma4",
        "gemma4_shared",
        "gemma4_moe",
        "deepseek_v2",
        "deepseek_v2_grouped",
    ],
)
def test_nothing_else_counts_in_blocks_of_other_kinds(variant: str, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant), **WAYS["fp32"])
    # With less, none of phi3's drafts are accepted in a run that preempts.
    few_blocks, budget = (32, 96) if variant == "phi3" else (30, 48)
    check_ways(machine, with_logprobs(requests(variant)[:24]), few_blocks=few_blocks, budget=budget)


@pytest.mark.parametrize("variant", ["qwen3_moe", "llama_bias"])
def test_nothing_else_counts_for_a_gguf_file(variant: str, tmp_path: Path) -> None:
    """Matrices of several types, some of which share one."""
    kinds = {f"blk.{i}.{name}.weight": kind for i in range(3) for name, kind in MIXED.items()}
    folder = write_tiny_checkpoint(variant, tmp_path / variant)
    machine = Machine(write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0", kinds=kinds), dtype="bfloat16")
    check_ways(machine, with_logprobs(requests(variant)[:24]), few_blocks=30)


def test_nothing_else_counts_for_a_real_file() -> None:
    wave = with_logprobs(requests("qwen3")[:6])  # token ids that any vocabulary has
    check_ways(Machine(smollm2(), dtype="bfloat16"), wave, few_blocks=12)
