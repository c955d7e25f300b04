"""Models that other libraries' converters make: the embedder MiniLM, a scikit-learn classifier, a LightGBM ranker.

They need more packages: pip install onnx onnxscript skl2onnx onnxmltools lightgbm.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Server, serving
from tests.encoders import minilm
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
pytestmark = pytest.mark.rare
FEATURES = 12
SENTENCES = [
    "The river flows to the sea.",
    "A short one",
    "Rain fell on the hills for three days, and then it stopped.",
]


def infer(server: Server, model: str, tensors: dict[str, Any], output: str) -> Any:
    names = {"float32": "FP32", "int64": "INT64"}
    inputs = [
        {"name": name, "datatype": names[str(array.dtype)], "shape": array.shape, "data": array.ravel().tolist()}
        for name, array in tensors.items()
    ]
    answer = server.post(f"/v2/models/{model}/infer", {"inputs": inputs, "outputs": [{"name": output}]})
    assert answer.status_code == 200, answer.text
    (made,) = answer.json()["outputs"]
    return np.array(made["data"]).reshape(made["shape"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def rows() -> Any:
    return np.random.default_rng(7).normal(size=(64, FEATURES)).astype(np.float32)


def test_a_classifier_of_scikit_learn(root: Path, rows: Any, tmp_path: Path) -> None:
    linear = pytest.importorskip("sklearn.linear_model", reason="pip install skl2onnx")
    convert = pytest.importorskip("skl2onnx", reason="pip install skl2onnx").to_onnx
    labels = (rows[:, 0] > 0).astype(int) + (rows[:, 1] > 0.5)
    classifier = linear.LogisticRegression().fit(rows, labels)
    put(root, "classifier", convert(classifier, rows[:1], options={"zipmap": False}).SerializeToString())
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:
        for count in (1, 32):
            found = infer(server, "classifier", {"X": rows[:count]}, "probabilities")
            assert np.abs(found - classifier.predict_proba(rows[:count])).max() < 1e-5


def test_a_ranker_of_lightgbm(root: Path, rows: Any, tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="pip install lightgbm")
    onnxmltools = pytest.importorskip("onnxmltools", reason="pip install onnxmltools")
    kinds = pytest.importorskip("onnxmltools.convert.common.data_types")
    grades = np.clip((rows[:, 0] * 2 + rows[:, 1]).round(), 0, 3).astype(int)
    ranker = lightgbm.LGBMRanker(n_estimators=20, min_child_samples=2, verbose=-1)
    ranker.fit(rows, grades, group=[16] * 4)
    shape = kinds.FloatTensorType([None, FEATURES])
    made = onnxmltools.convert_lightgbm(ranker, initial_types=[("x", shape)], zipmap=False)
    put(root, "ranker", made.SerializeToString())
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:
        found = infer(server, "ranker", {"x": rows[:32]}, made.graph.output[0].name)
        assert np.abs(found.ravel() - ranker.predict(rows[:32])).max() < 1e-5


def test_the_export_of_minilm_gives_what_the_embedder_gives(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript")
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = minilm()
    encoder = AutoModel.from_pretrained(path, attn_implementation="eager").float().eval()
    tokens = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    names = ["input_ids", "attention_mask"]
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    exported = torch.onnx.export(
        encoder,
        kwargs={name: tokens[name] for name in names},
        dynamo=True,
        input_names=names,
        output_names=["hidden"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        external_data=False,
    )
    version = put(root, "exported", b"")
    exported.save(version / "model.onnx")
    (root / "native").mkdir()
    (root / "native" / "model.yaml").write_text("model: all-minilm-l6-v2\nsettings: {dtype: float32, threads: 1}\n")
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:
        hidden = infer(server, "exported", {name: tokens[name].numpy() for name in names}, "hidden")
        answer = server.post("/v1/embeddings", {"model": "native", "input": SENTENCES}).json()
    mask = tokens["attention_mask"].numpy()[:, :, None]
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    vectors = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    native = np.array([each["embedding"] for each in answer["data"]])
    assert np.abs(vectors - native).max() < 1e-4
