"""Routes: names whose requests go to a small or a large model."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli.route.fit import fit
from penstock.cli.route.labels import Label
from penstock.config.tenants.keys import new_key
from penstock.frontend.providers.difficulty import MOST_BYTES, Classifier, features
from tests.frontend.conftest import NAME, parse_events
from tests.frontend.providers.conftest import FakeProvider, Gateway, Make, Reply
from tests.frontend.providers.streams import SAID, STREAMS
from tests.frontend.scripted import logprob_of
from tests.patience import until

EASY = ("def read_lines(path):", "for line in file: x += 1", "import os, sys", "class Node(object): pass", "x = [1, 2]")
HARD = ("Why is the sky blue?", "Who wrote this novel?", "What does a heart do?", "Tell me of the sea.", "Is it far?")
JSON = {"content-type": "application/json"}
CASCADE = {"small": NAME, "large": "remote"}


def labels() -> list[Label]:
    texts = [(f"{text} {i}", float(text in EASY)) for text in (*EASY, *HARD) for i in range(4)]
    return [Label(request={"prompt": text}, small=easy, large=1.0) for text, easy in texts]


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return fit(labels())


async def asked(site: Gateway, **fields: Any) -> Any:
    response = await site.ask("auto", **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def completed(site: Gateway, prompt: str) -> Any:
    return (await site.http.post("/v1/completions", json={"model": "auto", "prompt": prompt})).json()


def file_of(folder: Path, classifier: Classifier) -> str:
    path = folder / "route.json"
    path.write_bytes(msgspec.json.encode(classifier))
    return str(path)


def sureness(site: Gateway) -> float:
    """The mean log-probability of the answer of the model that is here."""
    ids = site.tokenizer.encode("hello", add_special_tokens=False)
    return sum(map(logprob_of, ids)) / len(ids)


async def cascade(gateway: Make, provider: FakeProvider, more: float = 0.0, **fields: Any) -> Gateway:
    """A server whose route takes answers of the model that is here if they are as sure as they are, and `more`."""
    limit = sureness(await gateway()) + more
    provider.replies = [Reply(STREAMS["openai"][0])]
    return await gateway(routes={"auto": {**CASCADE, "logprob": limit}}, **fields)


async def test_a_sure_answer_is_kept(gateway: Make, provider: FakeProvider) -> None:
    site = await cascade(gateway, provider)
    made = await asked(site)
    assert made["model"] == NAME and made["choices"][0]["message"]["content"] == "hello"
    assert made["choices"][0].get("logprobs") is None
    response = await site.ask("auto", stream=True)
    events = parse_events(response.content)
    assert events[0]["model"] == NAME and b"logprobs" not in response.content.replace(b'"logprobs":null', b"")
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == "hello"
    rows = (await asked(site, logprobs=True, top_logprobs=2, n=2))["choices"][1]["logprobs"]["content"]
    assert len(rows[0]["top_logprobs"]) == 2 and rows[0]["logprob"] == logprob_of(site.engine.output(None, 0)[0])  # type: ignore[arg-type]
    message = await asked(site, path="/v1/messages", max_tokens=9)
    assert message["model"] == NAME and message["content"][0]["text"] == "hello"
    assert not provider.requests
    assert site.value("penstock_routed_total", route="auto", model_name=NAME) == 4


async def test_the_large_model_answers_in_the_place_of_an_unsure_one(gateway: Make, provider: FakeProvider) -> None:
    site = await cascade(gateway, provider, more=1 / 1024)
    made = await asked(site)
    assert made["model"] == "remote" and made["choices"][0]["message"]["content"] == SAID
    events = parse_events((await site.ask("auto", stream=True)).content)
    assert {event["model"] for event in events} == {"remote"}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"]) == SAID
    assert (await asked(site, path="/v1/messages", max_tokens=9))["content"][0]["text"] == SAID
    completion = await completed(site, "hello")
    assert (completion["model"], completion["choices"][0]["text"]) == ("remote", SAID)
    assert len(site.engine.requests) == len(provider.requests) == 4
    assert site.value("penstock_fallbacks_total", model_name=NAME, next="remote") == 4
    assert (await site.ask(NAME)).json()["choices"][0]["message"]["content"] == "hello"  # its own name is no route


async def test_the_first_tokens_decide(gateway: Make, provider: FakeProvider) -> None:
    provider.replies = [Reply(STREAMS["openai"][0])]
    site = await gateway(routes={"auto": {**CASCADE, "logprob": -0.3, "tokens": 3}})
    sure, unsure = (
        [
            i
            for i in range(3, site.tokenizer.vocab_size)
            if logprob_of(i) == wanted and site.tokenizer.token_bytes(i).isalpha()
        ]
        for wanted in (-0.125, -0.875)
    )
    site.engine.output = lambda request, choice: [*sure[:3], *unsure[:20]]
    assert (await asked(site, max_tokens=20))["model"] == NAME
    site.engine.output = lambda request, choice: [*unsure[:3], *sure[:20]]
    assert (await asked(site, max_tokens=20))["model"] == "remote"
    assert len(site.engine.aborted) == 1  # the rest is not computed


async def test_a_small_model_that_cannot_answer_in_time(
    gateway: Make, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await cascade(gateway, provider)
    site.engine.dies_after = 0
    assert (await asked(site))["model"] == "remote"
    site.engine.dies_after, site.engine.gate = None, asyncio.Event()
    monkeypatch.setattr("penstock.frontend.providers.routing.HELD_SECONDS", 0.01)
    assert (await asked(site))["model"] == "remote"
    await until(lambda: site.engine.running == 0)
    site.engine.status = "asleep"
    assert (await asked(site))["model"] == "remote"
    site.engine.status, site.engine.gate = "ready", None
    assert (await site.ask("auto", top_p=7)).status_code == 400  # the client's mistake is one everywhere


async def test_the_prompt_decides(
    gateway: Make, provider: FakeProvider, classifier: Classifier, tmp_path: Path
) -> None:
    provider.replies = [Reply(STREAMS["openai"][0])]
    site = await gateway(routes={"auto": {**CASCADE, "classifier": file_of(tmp_path, classifier)}})
    for text, model in ((EASY[0], NAME), (HARD[0], "remote")):
        chat = [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": text}]}]
        assert (await asked(site, messages=chat))["model"] == model
        said = [{"role": "user", "content": text}]
        assert (await asked(site, path="/v1/messages", max_tokens=9, messages=said))["model"] == model
        ollama = await asked(site, path="/api/chat", stream=False, messages=said)
        assert ollama["message"]["content"] == ("hello" if model == NAME else SAID)
        assert (await completed(site, text))["model"] == model
        body = {"model": "auto", "input": text, "store": False}
        assert (await site.http.post("/v1/responses", json=body)).json()["model"] == model
    long = [{"role": "user", "content": EASY[0]}] * (MOST_BYTES // 40)
    assert (await asked(site, messages=long))["model"] == "remote"
    assert (await site.http.post("/v1/chat/completions", content=b'{"model": "auto"', headers=JSON)).status_code == 400
    assert site.value("penstock_routed_total", route="auto", model_name="remote") == 6
    site.engine.dies_after = 0
    assert (await asked(site, messages=[{"role": "user", "content": EASY[1]}]))["model"] == "remote"


async def test_a_route_is_listed_and_is_the_large_model_elsewhere(
    gateway: Make, classifier: Classifier, tmp_path: Path
) -> None:
    chosen = {"small": "remote", "large": NAME, "classifier": file_of(tmp_path, classifier)}
    site = await gateway(routes={"auto": chosen})
    names = [each["id"] for each in (await site.http.get("/v1/models")).json()["data"]]
    assert names == [NAME, "remote", "other-name", "auto"]
    assert (await site.http.get("/v1/models/auto")).json()["root"] == NAME
    assert (await site.http.post("/tokenize", json={"model": "auto", "prompt": "hello"})).json()["count"] > 0


async def test_the_ledger_has_the_small_answer_too(gateway: Make, provider: FakeProvider, tmp_path: Path) -> None:
    key, key_id, stored = new_key()
    entry = {"keys": [{"name": "default", "id": key_id, "hash": stored}]}
    tenants, state = tmp_path / "tenants.yaml", tmp_path / "state"
    tenants.write_text(json.dumps({"tenants": {"search": entry}}))
    site = await cascade(gateway, provider, 1 / 1024, server={"tenants": str(tenants), "state_dir": str(state)})
    site.http.headers["authorization"] = f"Bearer {key}"
    assert (await asked(site))["model"] == "remote"
    assert site.app.office is not None
    await site.app.office.close()
    rows = sqlite3.connect(state / "ledger.sqlite3").execute(
        "SELECT model, output > 0, error FROM requests ORDER BY began"
    )
    assert list(rows) == [(NAME, 1, "small_refused"), ("remote", 1, "")]


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (
            {"logprob": -1, "small": "m", "large": NAME},
            "auto.logprob: 'm' is at a provider, which sends no log-probabilities",
        ),
        ({"logprob": -1, "small": "alias"}, "name a small model of this server"),
        ({}, "auto.classifier: there is neither a classifier nor a logprob"),
        ({"logprob": 0.5}, "auto.logprob: it is 0.5; give a number from -100 to 0"),
        ({"logprob": -1, "tokens": 0}, "auto.tokens: it is 0; give a number from 1 to 4096"),
        ({"classifier": "x", "probability": 1.5}, "auto.probability: it is 1.5; give a number from 0 to 1"),
        ({"logprob": -1, "large": NAME}, f"auto.large: it is {NAME!r}, as `small` is"),
        ({"logprob": -1, "large": "nothing"}, "auto.large: there is no model 'nothing'"),
        ({"logprob": -1, "small": "nothing"}, "auto.small: there is no model 'nothing'"),
        ({"classifier": "/nonexistent"}, "auto.classifier: /nonexistent cannot be read: no such file"),
        ({"classifier": __file__}, "has no classifier ("),
    ],
)
async def test_mistakes(gateway: Make, route: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        await gateway(models={"m": {"aliases": ["alias"]}}, routes={"auto": {"small": NAME, "large": "m", **route}})
    assert str(error.value).startswith("--providers ") and ", at routes.auto." in str(error.value)
    assert words in str(error.value)


def test_features_are_bounded_and_read_the_newest_text() -> None:
    old, new = "alpha " * 5000, "beta"
    messages = [{"role": "user", "content": old}, {"role": "user", "content": new}]
    found = features({"messages": messages})
    assert found == features({"messages": [{"role": "user", "content": "alpha " * 500}, messages[1]]})
    assert found != features({"messages": messages[:1]})
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    assert features({"prompt": deep}) == features({"prompt": "x"})
    assert features({}) and features({"prompt": None, "messages": 3}) == features({})


def test_a_body_that_is_no_request(classifier: Classifier) -> None:
    for body in (b"", b"[1]", b"{", b"\xff", b'{"prompt": "' + b"x" * MOST_BYTES + b'"}'):
        assert classifier.probability_of(body) == 0.0
    assert classifier.probability_of(json.dumps({"prompt": EASY[2]}).encode()) > 0.5
