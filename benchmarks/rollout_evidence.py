"""Records what the judges of rollouts find of faults in a language model (docs/rollouts.md).

A server has the embedded model, the same model with its weights rounded a little, and with one fault each. Each request
runs on the model and on the other one, as in a rollout; the differences are written to a file, from which
tests/repository/test_recorded_rollouts.py draws the evidence of many rollouts.

    python benchmarks/rollout_evidence.py --json tests/assets/rollout_evidence.json
"""

import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch
from many_served import server
from results import parser, save
from safetensors.torch import load_file, save_file

from penstock.cli.serving.text_judges import TEXT_TOLERANCES
from penstock.cli.serving.text_rollouts import CHAT, TextComparison
from penstock.frontend import Serving
from penstock.frontend.http.asgi import Answer
from penstock.frontend.local import LocalRequests
from penstock.frontend.versions.serving import Version
from penstock.repository.rollouts.rollout import Rollout
from penstock.weights.packaged import embedded_model

PAIRS = 60
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WRONG_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
KINDS = ("equal", "layers swapped", "worse weights", "wrong template", "wrong stop token")
BEGINS = ("def {}(a, b):\n    return", "class {}:\n    def __init__(self", "for {} in range(", "import os\n\n{} = ")


def make(folder: Path, kind: str) -> None:
    """A copy of the model with a fault."""
    target = folder / "1"
    shutil.copytree(embedded_model(), target)
    (folder / "model.yaml").write_text("settings: {max-num-seqs: 8, kv-cache-memory: 32MiB, max-model-len: 256}\n")
    tensors, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(1)
    if kind == "layers swapped":
        for name in [name for name in tensors if "model.layers.2." in name]:
            other = name.replace("layers.2.", "layers.5.")
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()
    share = {"equal": 0.002, "worse weights": 0.35}.get(kind, 0.0)
    if share:
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * share
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors")
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings["chat_template"] = WRONG_TEMPLATE if kind == "wrong template" else TEMPLATE
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "wrong stop token":
        for name in ("config.json", "generation_config.json"):
            fields = json.loads((target / name).read_text())
            (target / name).write_text(json.dumps(fields | {"eos_token_id": 5}))


class Remote(LocalRequests):
    """Requests to a model of the server."""

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self._http, self._name = http, name

    async def answer(self, path: str, body: bytes, request_id: str = "", tenant: str = "") -> Answer:
        answer = await self._http.post(path, json={**json.loads(body), "model": self._name})
        return Answer(answer.content, answer.status_code)


class Recorder(Rollout):
    """Keeps what the judges find."""

    judges = TEXT_TOLERANCES.keys() - {"latency"}  # type: ignore[assignment]

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {judge: [] for judge in sorted(self.judges)}

    def add(self, judge: str, difference: float | None) -> None:
        if difference is not None:
            self.found[judge].append(round(difference, 4))

    def look(self) -> None:
        """Nothing is decided."""


async def record(url: str) -> dict[str, Any]:
    found = {}
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        for number, kind in enumerate(KINDS, 1):
            draw, recorder = random.Random(1), Recorder()
            arms = Remote(http, "model-0"), Remote(http, f"model-{number}")
            serving, candidate = Serving.__new__(Serving), Version.__new__(Version)
            comparison = TextComparison(recorder, serving, candidate, arms, lambda: None)
            for pair in range(PAIRS):
                content = draw.choice(BEGINS).format(f"name{pair}")
                fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 48, "temperature": 0.7}
                await comparison._compare(CHAT, json.dumps({**fields, "seed": pair}).encode())
            found[kind] = recorder.found
    return found


def main() -> None:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "models"
        for number, kind in enumerate(("", *KINDS)):
            make(root / f"model-{number}", kind)
        with server(Path(name), root) as (url, _):
            found = asyncio.run(record(url))
    save({"pairs": PAIRS, "kinds": found}, options.json)


if __name__ == "__main__":
    main()
