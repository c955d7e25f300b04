"""Embeddings equal those of sentence-transformers with the same model, the real one and tiny ones of each encoder.

python -m tests.clients install FOLDER sentence-transformers
TEST_CLIENTS=FOLDER pytest -m "" tests/clients/test_sentence_transformers.py
"""

import json
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.clients.matrix import CLIENTS, PROGRAMS, Client
from tests.e2e.server import serving
from tests.encoders import add_roberta_tokenizer, add_tokenizer, minilm, tiny_encoder

TEXTS = ["A penstock is a pipe.", "The pipe that feeds a turbine. " * 4, "x", "0 1 2?"]
pytestmark = pytest.mark.rare


@pytest.fixture(
    params=[client for client in CLIENTS if client.package == "sentence-transformers"], ids=lambda client: client.name
)
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter that has sentence-transformers."""
    client: Client = request.param
    if not client.is_installed():
        pytest.skip(f"TEST_CLIENTS has no {client.name}")
    return client.runtime()


def check(python: Path, folder: Path, tmp_path: Path) -> None:
    """Compares the embeddings of a model in sentence-transformers' form."""
    command = [str(python), str(PROGRAMS / "sentence_embeddings.py"), str(folder)]
    done = subprocess.run(command, input=json.dumps(TEXTS), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    exact = np.array(json.loads(done.stdout.splitlines()[-1]))
    with serving(tmp_path / "log", "--dtype", "float32", model=str(folder)) as server:
        answer = httpx.post(server.url + "/v1/embeddings", json={"input": TEXTS}, timeout=60).json()
    found = np.array([each["embedding"] for each in answer["data"]])
    assert np.abs(found - exact).max() < 1e-4
    assert found.std(0).mean() > 0.01  # else all texts would have the same


def test_the_real_model(python: Path, tmp_path: Path) -> None:
    check(python, minilm(), tmp_path)


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("variant", ["bert", "xlm_roberta", "modernbert"])
def test_a_tiny_encoder(python: Path, variant: str, mode: str, tmp_path: Path) -> None:
    write_sentence_model(tmp_path / "model", variant, mode)
    check(python, tmp_path / "model", tmp_path)


def write_sentence_model(folder: Path, variant: str, mode: str) -> None:
    """A tiny random encoder with the files of sentence-transformers: it pools and normalises."""
    tiny_encoder(variant).save_pretrained(folder)
    roberta = variant == "xlm_roberta"
    (add_roberta_tokenizer if roberta else add_tokenizer)(folder)
    pad = "<pad>" if roberta else "[PAD]"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "model_max_length": 150})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 150, "do_lower_case": False}))
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(names.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": mode == "mean"}
    pooling["pooling_mode_cls_token"] = mode == "cls"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
