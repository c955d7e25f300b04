"""Rollouts of language models: a golden set, copies of requests on both versions, and who gets which version."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.cli.serving.text_judges import TEXT_JUDGES, Likelihood, TextOutcome, TextPair, likelihood_of
from penstock.weights.packaged import embedded_model
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for

SETTINGS = "versions: [1]\nsettings: {max-num-seqs: 8, kv-cache-memory: 32MiB, max-model-len: 256, threads: 1}\n"
PROMPTS = [f"def f{number}(a, b):\n    return" for number in range(40)]
WIDE = {"hold": 0, "tolerances": {"errors": 0.4, "length": 0.4, "likelihood": 0.4}}


def put_version(folder: Path, number: int, *, swap: bool = False) -> None:
    """Version 1 is the embedded model. Another one differs a little; with `swap`, two layers have changed places."""
    target = folder / str(number)
    shutil.copytree(embedded_model(), target)
    if number == 1:
        return
    tensors = load_file(target / "model.safetensors")
    if swap:
        first, second = "model.layers.1.", "model.layers.6."
        names = {name: name.replace(first, second) for name in tensors if first in name}
        assert names
        for one, other in names.items():
            tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()
    else:
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * torch.tensor(1.004, dtype=torch.bfloat16)
    save_file(tensors, target / "model.safetensors")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "writer"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(SETTINGS)
    put_version(folder, 1)
    return tmp_path / "models"


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[Server]:
    put_version(root / "writer", 2, swap=True)
    put_version(root / "writer", 3)
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as running:
        yield running


def stream(server: Server, prompt: str, session: str = "") -> set[str]:
    """The fingerprints in the events of a stream, which must end well."""
    body = {"model": "writer", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"x-session-id": session} if session else {}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return {json.loads(event)["system_fingerprint"] for event in events}


def state(server: Server) -> dict[str, Any]:
    rows: list[dict[str, Any]] = server.get("/v2/repository/rollouts").json()["rollouts"]
    return rows[-1]


def start(server: Server, candidate: int, **rules: Any) -> None:
    body = {"action": "start", "candidate": candidate, **rules}
    answer = server.post("/v2/repository/models/writer/rollout", body)
    assert answer.status_code == 200, answer.text


def test_a_version_takes_over_as_far_as_its_answers_hold_up(server: Server, root: Path) -> None:
    (old,) = stream(server, PROMPTS[0])
    lines = [{"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in PROMPTS]
    (root / "writer" / "golden.jsonl").write_text("\n".join(map(json.dumps, lines)))

    # Its layers are in the wrong order: the golden set finds that before any user gets an answer of it.
    start(server, 2, plan=[100], **WIDE)
    wait_for(lambda: state(server)["status"] == "rolled back", "the candidate to be rolled back")
    assert state(server)["reason"].startswith("likelihood: worse by ")
    wait_for(lambda: len(server.post("/v2/repository/index", {"ready": True}).json()) == 1, "its engine to end")
    assert stream(server, PROMPTS[0]) == {old}

    (root / "writer" / "golden.jsonl").write_text("no JSON\n")
    start(server, 3, plan=[100], **WIDE)
    wait_for(lambda: state(server)["status"] == "aborted", "the rollout to be aborted")
    assert "golden.jsonl cannot be used" in state(server)["reason"]
    wait_for(lambda: len(server.post("/v2/repository/index", {"ready": True}).json()) == 1, "its engine to end")
    (root / "writer" / "golden.jsonl").unlink()
    start(server, 3, plan=[50, 100], **(WIDE | {"hold": 3600}))
    first = {session: stream(server, PROMPTS[0], session) for session in map(str, range(12))}
    assert {len(each) for each in first.values()} == {1} and {old} in first.values()
    assert len(set.union(*first.values())) == 2
    assert first == {session: stream(server, PROMPTS[0], session) for session in first}
    wait_for(lambda: state(server)["judges"][0]["requests"] > 0, "a copy to be compared")
    assert 'model_name="writer version 3"' in server.get("/metrics").text
    assert server.post("/v2/repository/models/writer/rollout", {"action": "abort"}).status_code == 200
    wait_for(lambda: len(server.post("/v2/repository/index", {"ready": True}).json()) == 1, "its engine to end")
    assert stream(server, PROMPTS[0], "3") == {old}


@pytest.mark.rare
def test_all_requests_of_16_clients_move(server: Server) -> None:
    """No request fails, and a stream is of one version."""
    (old,) = stream(server, PROMPTS[0])
    start(server, 3, plan=[0, 50, 100], **WIDE)
    seen = []
    with ThreadPoolExecutor(16) as pool:
        while state(server)["status"] == "running":
            seen += list(pool.map(lambda prompt: stream(server, prompt), PROMPTS))
        wait_for(lambda: stream(server, PROMPTS[1]) != {old}, "the new version to serve")
        seen += list(pool.map(lambda prompt: stream(server, prompt), PROMPTS))
    assert state(server)["status"] == "promoted", state(server)
    assert all(len(each) == 1 for each in seen) and old not in set.union(*seen[-len(PROMPTS) :])
    wait_for(lambda: 'model_name="writer version 3"' not in server.get("/metrics").text, "the metrics to be joined")


def answered(text: str, tokens: int = 4, **fields: Any) -> TextOutcome:
    return TextOutcome(False, 0.1, text, tokens, **fields)


def judged(judge: str, incumbent: TextOutcome, candidate: TextOutcome, **request: Any) -> float | None:
    return TEXT_JUDGES[judge](TextPair(request, incumbent, candidate))


def test_judges_of_texts() -> None:
    plain, failed = answered("a b c d e"), TextOutcome(True, 0.1)
    assert judged("errors", plain, failed) == 1 and judged("errors", failed, plain) == -1
    assert judged("length", plain, answered("a", 16)) == judged("length", answered("a", 16), plain) == 0.75
    assert judged("length", plain, failed) is None
    assert judged("latency", plain, plain._replace(seconds=0.2)) == 0.5
    assert judged("repetition", plain, answered("a b c d " * 10)) == pytest.approx(33 / 37)
    wants = {"response_format": {"type": "json_object"}}
    assert judged("validity", answered("{}"), answered("{"), **wants) == 1
    assert judged("validity", answered("{"), answered("{}"), **wants) == -1
    assert judged("validity", answered("", calls=True), plain, tools=[{}]) == 1
    assert judged("validity", plain, plain) is None and judged("likelihood", plain, plain) is None
    pair = TextPair({}, plain, plain, (Likelihood(0.5, 0.1), Likelihood(0.9, 0.4)))
    assert TEXT_JUDGES["likelihood"](pair) == pytest.approx(0.4)
    assert TEXT_JUDGES["agreement"](pair) == pytest.approx(0.3)


def test_the_likelihood_of_a_text_is_that_of_the_last_tokens() -> None:
    texts = ["x", "y", "ab", "c"]
    rows = [
        None,
        *({"1": {"logprob": -number, "rank": number, "decoded_token": text}} for number, text in enumerate(texts)),
    ]
    assert likelihood_of(rows, "abc", 2) == Likelihood(2.5, 1.0)
    assert likelihood_of(rows, "yabc", 2) == Likelihood(3.0, 2 / 3)
    assert likelihood_of(rows, "a text that is longer than the prompt", 9) is None
    assert likelihood_of([], "ab", 1) is None
