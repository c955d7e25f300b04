"""Decoders that only transformers' code executes, with our attention: tokens and logprobs are transformers' own, and
what would be wrong is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.config import EngineConfig, Split
from penstock.families import FAMILIES, CannotSplit, UnsupportedModel, load_spec, rank_facts
from penstock.families.transformers_model import uses_interface
from penstock.kernels import detect_platform
from penstock.messages import GenerateRequest, SamplingParams
from penstock.models import transformers_decoder
from penstock.models.transformers_decoder import TransformersDecoder
from penstock.runtime.loading.transformers_probe import check_transformers
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters
from tests.models.logits import assert_near_in_fp32, expected_logits, kernels_on, logits_of, make_prompts
from tests.models.other_models import OTHERS, other_model, write_other
from tests.models.serving import Server, make_runner, outputs
from tests.often import often

NEW = ("CodeGen", "GPTJ")  # transformers has used the AttentionInterface for these since a version 5.x
ARCHITECTURES = [
    name
    for name in OTHERS
    if f"{name}ForCausalLM" not in FAMILIES and (name not in NEW or uses_interface(f"{name}ForCausalLM", name.lower()))
]
FEW = ("FlexOlmo", "GPTBigCode", "Helium", "VaultGemma")  # experts, learned positions, plain, windows
MANY = often(ARCHITECTURES, FEW)
OUTPUT = 24  # with the longest prompts past the window of 16


def test_fifteen_architectures_are_tried() -> None:
    assert len(ARCHITECTURES) >= 15


def probe(runner: ModelRunner, folder: Path, dtype: Any = "float32") -> None:
    config = EngineConfig(model=str(folder), name="tiny", dtype=dtype, max_model_len=256, max_num_seqs=16)
    check_transformers(runner, config)


@pytest.mark.parametrize("name", MANY)
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """Chunks beside decodes, then again from the prefix cache."""
    folder, model, prompts = write_other(name, tmp_path), other_model(name), make_prompts(seed=1)
    runner = make_runner(folder)
    probe(runner, folder)
    server = Server(runner, budget=45, caching=True)
    for round_ in "ab":
        deltas = server.run(
            GenerateRequest(
                request_id=f"{round_}{i}",
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(seed=0, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
            )
            for i, prompt in enumerate(prompts)
        )
        tokens = outputs(deltas)
        for i, prompt in enumerate(prompts):
            assert tokens[f"{round_}{i}", 0] == generated(model, prompt)
    assert sum(delta.cached_tokens for delta in deltas) > 100


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("name", MANY)
def test_logits_in_fp32(name: str, tmp_path: Path) -> None:
    folder, model, prompts = write_other(name, tmp_path), other_model(name), make_prompts()
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    got = logits_of(
        spec,
        parameters,
        kernels_on(detect_platform(), spec),
        prompts,
        chunk=7,
        make=lambda spec, held, kernels, **_: TransformersDecoder(spec, held, kernels),
    )
    for prompt, ours in zip(prompts, got, strict=True):
        assert_near_in_fp32(ours, expected_logits(model, prompt))


def test_bf16(tmp_path: Path) -> None:
    folder = write_other("Helium", tmp_path, dtype=torch.bfloat16)
    probe(make_runner(folder, dtype="bfloat16"), folder, "bfloat16")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Bloom", {}),
        ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}),
        ("GPTNeoXJapanese", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}),
        ("BigBird", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "is_decoder": True}),
        ("GPTNeo", {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "attention_types": [[["global"], 2]]}),
        ("XGLM", {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64}),
    ],
)
def test_those_without_the_interface_are_refused_by_name(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=307, **sizes)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"'{name}ForCausalLM' is not supported.*AttentionInterface"):
        load_spec(tmp_path)


# What a tiny checkpoint's config.json is changed to, and the words of the refusal.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Helium", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
    ("Helium", {"kv_lora_rank": 16}, "kv_lora_rank 16"),
    ("Helium", {"attention_chunk_size": 16}, "attention_chunk_size 16"),
    ("Helium", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ("Helium", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
    (
        "Helium",
        {"architectures": ["NoSuchForCausalLM"]},
        "'NoSuchForCausalLM' is not supported; transformers .* not",
    ),
    ("Helium", {"model_type": "../helium"}, "'HeliumForCausalLM' is not supported; transformers .* does not have it"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED, ids=str)
def test_configurations_that_are_refused(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        load_spec(changed(write_other(name, tmp_path), change))


# What the first step of the probe finds: config.json says one thing, transformers' code does another.
FOUND: list[tuple[str, dict[str, Any], str]] = [
    ("Helium", {"sliding_window": 16}, "layer 0 has the window 0, where config.json says 16"),
    ("GPTBigCode", {"multi_query": False}, "has tensors of another shape: .*c_attn"),
    ("Helium", {"num_hidden_layers": 4}, "has no tensor model.layers.3"),
    ("Helium", {"num_hidden_layers": 2}, "has the unexpected tensor model.layers.2"),
    ("Helium", {"rope_parameters": {"rope_type": "unheard-of"}}, "cannot be used: KeyError.*unheard-of"),
]


@pytest.mark.parametrize(("name", "change", "words"), FOUND, ids=str)
def test_the_probe(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = changed(write_other(name, tmp_path), change)
    with pytest.raises(UnsupportedModel, match=words):
        probe(make_runner(folder), folder)


def test_the_probe_finds_other_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale of attention that is off by a twentieth."""
    folder, attend = write_other("Helium", tmp_path), transformers_decoder._attend

    def wrong(*arguments: Any, scaling: float, **others: Any) -> tuple[torch.Tensor, None]:
        return attend(*arguments, scaling=scaling * 1.05, **others)

    monkeypatch.setattr(transformers_decoder, "_attend", wrong)
    runner = make_runner(folder)
    with pytest.raises(UnsupportedModel, match="logprobs of a random prompt differ by"):
        probe(runner, folder)


def test_ranks_are_refused(tmp_path: Path) -> None:
    spec = load_spec(write_other("Helium", tmp_path))
    with pytest.raises(CannotSplit, match="executes HeliumForCausalLM whole"):
        rank_facts(spec, Split(2))


def test_code_of_a_models_folder_is_not_run(tmp_path: Path) -> None:
    folder = changed(
        write_other("Helium", tmp_path),
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}, "_attn_implementation": "evil/kernel"},
    )
    (folder / "code.py").write_text("raise SystemExit('the code of a model was run')")
    probe(make_runner(folder), folder)


def changed(folder: Path, change: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder
