"""The dashboard's models, by its own script in Node, from what a real server answers."""

import json
import shutil
import subprocess
from importlib.resources import files as files_of
from pathlib import Path

import pytest

from tests.e2e.server import serving
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put
from tests.repository.served import tensor

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node: apt install nodejs")
pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
SCRIPT = """
globalThis.document = { hidden: true };
globalThis.sessionStorage = { getItem: () => null };
const { figures } = await import(PAGE);
const [index, before, now] = DATA;
const keyed = (stats) => Object.fromEntries(stats.map((each) => [`${each.name}/${each.version}`, each]));
const at = (time, stats) => ({ time, ...keyed(stats) });
console.log(JSON.stringify(index.map((row) => figures(row, at(12, now), at(10, before)))));
"""


def test_each_model_has_a_row(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "ranks", files.scale(2))
    put(root, "broken", b"no model")
    (root / "chat").mkdir()
    (root / "chat" / "model.yaml").write_text("model: python-8m\n")  # it has no such statistics
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:

        def stats() -> object:
            return server.get("/v2/models/stats").json()["model_stats"]

        x = tensor("x", [1.0] * 12, [3, 4])
        before = stats()
        for _ in range(4):
            assert server.post("/v2/models/ranks/infer", {"inputs": [x]}).status_code == 200
        data = [server.post("/v2/repository/index", {}).json(), before, stats()]
    page = f"{files_of('penstock.frontend.pages')}/dashboard/repository.js"
    script = SCRIPT.replace("PAGE", json.dumps(page)).replace("DATA", json.dumps(data))
    command = [NODE or "", "--experimental-default-type=module", "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["broken"]["state"] == "UNAVAILABLE" and "no ONNX model" in rows["broken"]["reason"]
    assert rows["chat"]["state"] == "READY" and "rate" not in rows["chat"]
    found = rows["ranks"]
    assert (found["requests"], found["rate"], found["batch"]) == (4, 2, 3) and 0 < found["latency"] < 5
