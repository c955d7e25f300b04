"""Encoders against transformers: the same hidden states, embeddings and logits, however texts share a step."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import EngineConfig
from penstock.families import ModelSpec, UnsupportedModel, load_spec
from penstock.kernels import Needs, Platform, detect_platform, select_kernels
from penstock.kernels.native.loader import instruction_sets
from penstock.messages import NewSequence, PoolingParams, SamplingParams, StepPlan, Work
from penstock.models.encoder import Encoder, Texts
from penstock.runtime.encoder_runner import EncoderRunner
from penstock.runtime.loading.encoder import load_encoder
from penstock.runtime.programs.recorded_encoder import TOKENS_PER_THREAD, RecordedEncoder
from penstock.weights.load import load_parameters
from tests.encoders import ENCODERS, minilm, tiny_encoder

LENGTHS = (33, 1, 150, 7, 90, 7)  # longer than the window, and two of equal length


def ids_of(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 307, (length,), generator=generator).tolist() for length in lengths]


def runner_of(folder: Path, **changes: Any) -> EncoderRunner:
    config = EngineConfig(
        model=str(folder),
        name="encoder",
        device="cpu",
        **{
            "dtype": "float32",
            "max_model_len": 150,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "threads": 1,
            **changes,
        },
    )
    return load_encoder(config, load_spec(folder), (), progress=False)


def vectors(runner: EncoderRunner, texts: Sequence[Sequence[int]], second: Sequence[int] = ()) -> np.ndarray:
    new = [
        NewSequence(
            i,
            tuple(ids),
            len(ids),
            0,
            ((1,),),
            SamplingParams(seed=0, max_tokens=1),
            0,
            pooling=PoolingParams(second[i] if second else 0),
        )
        for i, ids in enumerate(texts)
    ]
    work = tuple(Work(each.seq, each.num_prompt, True) for each in new)
    result = runner.execute(StepPlan(1, work, tuple(new)))
    runner.execute(StepPlan(2, (), gone=tuple(each.seq for each in new)))
    assert [each.seq for each in result.results] == [each.seq for each in new]
    assert not any(each.error for each in result.results)
    return np.stack([np.frombuffer(each.pooled, np.float32) for each in result.results])


def expected(model: Any, ids: Sequence[int], second: int) -> np.ndarray:
    types = {}
    if "Bert" in type(model).__name__ and model.config.model_type == "bert":
        types["token_type_ids"] = (torch.arange(len(ids)) >= (second or len(ids))).long()[None]
    with torch.inference_mode():
        given = model(torch.tensor([list(ids)]), output_hidden_states=True, **types)
    if "logits" in given and model.config.architectures and "Sequence" in model.config.architectures[0]:
        return given.logits[0].numpy()
    last = given.last_hidden_state if "last_hidden_state" in given else given.hidden_states[-1]
    return last[0].mean(0).numpy()


@pytest.mark.parametrize("variant", ENCODERS)
def test_equals_transformers(variant: str, tmp_path: Path) -> None:
    model, texts = tiny_encoder(variant), ids_of(LENGTHS)
    model.save_pretrained(tmp_path)
    model.config.architectures = [ENCODERS[variant][0]]
    runner = runner_of(tmp_path)
    second = [len(ids) // 2 for ids in texts]
    found = vectors(runner, texts, second)
    wanted = np.stack([expected(model, ids, place) for ids, place in zip(texts, second, strict=True)])
    assert np.abs(found - wanted).max() < 1e-5
    assert found.std(0).mean() > 0.1, "vectors that are all alike hide errors"
    # No text depends on those beside it: with native kernels embeddings are equal to the bit.
    alone = np.concatenate([vectors(runner, [ids], [place]) for ids, place in zip(texts, second, strict=True)])
    to_the_bit = instruction_sets() and "Sequence" not in ENCODERS[variant][0]  # torch multiplies by the classifier
    assert np.array_equal(found, alone) if to_the_bit else np.abs(found - alone).max() < 1e-5


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("bert", lambda spec: replace(spec, norm_eps=0.1)),
        ("bert", lambda spec: replace(spec, encoder=replace(spec.encoder, activation="gelu"))),
        ("roberta", lambda spec: replace(spec, encoder=replace(spec.encoder, first_position=0))),
        ("modernbert", lambda spec: with_attention(spec, reach=0)),
        ("modernbert", lambda spec: with_attention(spec, rope=spec.layers[1].attention.rope)),
    ],
)
def test_each_part_of_a_spec_matters(variant: str, change: Any, tmp_path: Path) -> None:
    model = tiny_encoder(variant)
    model.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    (ids,) = ids_of((90,))

    def vector(spec: ModelSpec) -> torch.Tensor:
        parameters = load_parameters(tmp_path, spec, torch.float32, progress=False)
        encoder = Encoder(spec, parameters, select_kernels(Platform("cpu", ""), Needs(torch.float32)))
        with torch.inference_mode():
            return encoder.pool(encoder.forward(Texts(torch.tensor(ids), [90], [90])), [90])

    wanted = expected(model, ids, 0)
    assert np.abs(vector(spec).numpy() - wanted).max() < 1e-5
    assert np.abs(vector(change(spec)).numpy() - wanted).max() > 2e-4


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(
        spec, layers=tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
    )


def test_a_text_that_overflows_fails_alone(tmp_path: Path) -> None:
    model = tiny_encoder("bert")
    model.embeddings.word_embeddings.weight.data[5] = float("nan")
    model.save_pretrained(tmp_path)
    runner = runner_of(tmp_path)
    new = [
        NewSequence(i, ids, 3, 0, ((1,),), SamplingParams(seed=0, max_tokens=1), 0, pooling=PoolingParams())
        for i, ids in enumerate([(3, 4, 6), (3, 5, 6)])
    ]
    first, second = runner.execute(StepPlan(1, tuple(Work(i, 3, True) for i in (0, 1)), tuple(new))).results
    assert first.pooled and not first.error
    assert "NaN" in second.error and not second.pooled


@pytest.fixture(scope="module")
def sentences() -> list[list[int]]:
    from penstock.text import Tokenizer

    tokenizer = Tokenizer.load(minilm())
    texts = ["A penstock is a pipe.", "The pipe that feeds a turbine under full head.", "My dog is brown.", "x " * 200]
    return [list(tokenizer.encode_text(text).ids) for text in texts]


@pytest.fixture(scope="module")
def exact(sentences: list[list[int]]) -> np.ndarray:
    """The embeddings by transformers, pooled as modules.json says."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(minilm())
    rows = []
    for ids in sentences:
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, 1e-6), ({"dtype": "bfloat16"}, 1e-2), ({"quantization": "int8"}, 1e-2)],
    ids=["fp32", "bf16", "int8"],
)
def test_the_real_model(sentences: list[list[int]], exact: np.ndarray, settings: dict[str, Any], most: float) -> None:
    runner = runner_of(minilm(), max_model_len=256, **settings)
    found = vectors(runner, sentences)
    assert np.abs(found - exact).max() < most
    assert (found * exact).sum(1).min() > 0.999
    assert found[0] @ found[1] > found[0] @ found[2] + 0.3, "related sentences are near each other"


class TestModules:
    """What the files of sentence-transformers say."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        shutil.copytree(minilm(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "data_config.json"))
        return tmp_path / "m"

    @pytest.mark.parametrize(
        ("fields", "mode"),
        [
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
            ({"pooling_mode": "lasttoken"}, "last"),
            ({"pooling_mode": ["max"]}, "max"),
            ({"pooling_mode_mean_tokens": False}, "mean"),
        ],
    )
    def test_the_pooling(self, folder: Path, fields: dict[str, Any], mode: str) -> None:
        path = folder / "1_Pooling" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        assert load_spec(folder).pooling.mode == mode

    def test_length_norm_and_prompts(self, folder: Path) -> None:
        (folder / "modules.json").write_text(json.dumps(json.loads((folder / "modules.json").read_text())[:2]))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
        (folder / "config_sentence_transformers.json").write_text(
            '{"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}'
        )
        spec = load_spec(folder)
        assert spec.pooling is not None and spec.max_position == 77 and not spec.pooling.normalize
        assert spec.pooling.prompts == {"query": "query: ", "document": ""} and spec.pooling.default_prompt == "query"

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            (
                "modules.json",
                '[{"type": "a.Dense", "path": "2"}]',
                "module 'Dense'; supported: one each of Transformer",
            ),
            ("modules.json", '[{"type": "a.Transformer", "path": "../x"}]', "outside the model's folder"),
            ("modules.json", '[{"type": "a.Transformer", "path": ""}]', "no Pooling module"),
            ("modules.json", "{}", "not a list of modules"),
            ("modules.json", "[", "not valid JSON"),
            ("1_Pooling/config.json", '{"pooling_mode": "weightedmean"}', "pooling_mode 'weightedmean'"),
            ("1_Pooling/config.json", '{"include_prompt": false}', "include_prompt False"),
            ("sentence_bert_config.json", '{"max_seq_length": "all"}', "max_seq_length is 'all'"),
            ("config_sentence_transformers.json", '{"default_prompt_name": "x"}', "default_prompt_name 'x'"),
            ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "a is 1; expected a string"),
        ],
    )
    def test_what_is_refused(self, folder: Path, name: str, text: str, words: str) -> None:
        (folder / name).write_text(text)
        with pytest.raises(UnsupportedModel) as caught:
            load_spec(folder)
        assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_recorded_layers_give_the_bits_of_eager_ones(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of texts that are divided into several parts, and of a long one."""
    tiny_encoder(variant).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    kernels = select_kernels(detect_platform(), Needs(dtype, head_dims=(16,)))
    model = Encoder(spec, load_parameters(tmp_path, spec, dtype, progress=False), kernels)
    assert kernels.session is not None
    recorded = RecordedEncoder(model, kernels.session, spec.hidden_size, dtype, 150)
    for lengths in (LENGTHS, (TOKENS_PER_THREAD // 2,) * 5, (1,) * (TOKENS_PER_THREAD + 1), (150,)):
        ids = torch.tensor([token for text in ids_of(lengths) for token in text])
        with torch.inference_mode():
            texts = Texts(ids, lengths, lengths)
            assert torch.equal(recorded.forward(texts), model.forward(texts))
