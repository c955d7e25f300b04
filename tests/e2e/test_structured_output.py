"""Answers in a wanted form, from SmolLM2 through OpenAI's client."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.bounded_schemas import bounded_schemas
from tests.e2e.server import Server, gauge, serving
from tests.engine.processes import alive, children
from tests.patience import PATIENCE, wait_for

NAMES = ["Alice Cooper", "Bob Ito", "Zoë Ångström", "Carlos de la Vega", "Mei-Ling Wu"]
CITIES = ["Paris", "Kyoto", "São Paulo", "New York", "Nairobi", "Reykjavík", "Lima", "Oslo", "Cairo", "Perth"]
PEOPLE = [(name, 20 + 7 * i + j, city) for i, name in enumerate(NAMES) for j, city in enumerate(CITIES)]


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=40)
    age: int = pydantic.Field(ge=0, le=150)
    city: str = pydantic.Field(max_length=40)
    mood: Literal["happy", "sad", "unknown"]
    tags: list[str] = pydantic.Field(max_length=2)


SCHEMA = Person.model_json_schema()
# pydantic does not bound the texts in a list.
SCHEMA["properties"]["tags"]["items"]["maxLength"] = 20


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is asked for grammars has one more process; it ends with the server."""
    flags = ("--max-num-seqs", "16", "--kv-cache-memory", "256MiB")
    with serving(tmp_path_factory.mktemp("serve") / "log", *flags, model="smollm2-135m") as server:
        yield server
        helpers = children(server.process.pid)
        assert len(helpers) == 2
    wait_for(lambda: not any(map(alive, helpers)), "both processes to end")


@pytest.fixture
def client(chatting: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=chatting.url + "/v1", api_key="unused", max_retries=0)


def ask(person: tuple[str, int, str]) -> list[Any]:
    name, age, city = person
    text = f"{name}, who turned {age} last week, is glad to live in {city}."
    return [{"role": "user", "content": f"Extract the person as JSON with name, age, city, mood and tags: {text}"}]


@pytest.mark.long
async def test_fifty_extractions_are_valid(chatting: Server) -> None:
    """Streamed, sixteen at a time, greedy and drawn."""
    client = openai.AsyncOpenAI(base_url=chatting.url + "/v1", api_key="unused", max_retries=0)
    model = (await client.models.list()).data[0].id
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}

    async def extract(i: int) -> str:
        stream = await client.chat.completions.create(
            model=model,
            messages=ask(PEOPLE[i]),
            response_format=wanted,
            stream=True,
            max_tokens=400,
            seed=i,
            temperature=i % 2,
        )
        text, reason = "", None
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert reason == "stop", text
        return text

    texts = await asyncio.gather(*(extract(i) for i in range(len(PEOPLE))))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        Person.model_validate_json(text)
    assert len(texts) == 50
    # What the model got right by itself shows that it wrote, and not the mask alone.
    assert sum(json.loads(text)["age"] == age for text, (_, age, _) in zip(texts, PEOPLE, strict=True)) >= 10


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="smollm2-135m", messages=ask(PEOPLE[0]), response_format=Person, max_tokens=400, temperature=0
    )
    person = completion.choices[0].message.parsed
    assert isinstance(person, Person) and person.name.startswith("Alice")


def test_every_form(client: openai.OpenAI) -> None:
    def answers(**how: Any) -> list[str]:
        messages: Any = [{"role": "user", "content": "Say something."}]
        given = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=60, **how)
        assert all(choice.finish_reason in ("stop", "length") for choice in given.choices)
        return [choice.message.content or "" for choice in given.choices]

    assert all(text in ("yes", "no") for text in answers(n=4, extra_body={"guided_choice": ["yes", "no"]}))
    (text,) = answers(extra_body={"structured_outputs": {"regex": "[A-Z]{2}-[0-9]{4}"}}, logprobs=True, top_logprobs=3)
    assert re.fullmatch("[A-Z]{2}-[0-9]{4}", text)
    assert answers(extra_body={"guided_grammar": 'root ::= "hello " ("world" | "moon")'})[0][6:] in ("world", "moon")
    assert json.loads(answers(extra_body={"guided_json": {"type": "integer", "minimum": 5, "maximum": 6}})[0]) in (5, 6)
    (text,) = answers(response_format={"type": "json_object"}, temperature=0)
    assert text.startswith("{")
    as_llama_cpp = {"type": "json_object", "schema": {"type": "integer", "minimum": 5, "maximum": 6}}
    assert answers(extra_body={"response_format": as_llama_cpp})[0] in ("5", "6")


def test_the_example_runs_as_written(chatting: Server) -> None:
    page = Path(__file__).parents[2] / "docs" / "structured-output.md"
    (example,) = re.findall("```python\n(.*?)```", page.read_text(), re.DOTALL)
    code = example.replace("http://127.0.0.1:8000", chatting.url)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert re.fullmatch(r"name='.*' age=\d+ city='.*'\n(yes|no)\n", run.stdout), run.stderr


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_held_is_a_400(chatting: Server, how: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **how}
    answer = chatting.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param) and answer.json()["error"]["code"] == "invalid_grammar"


def test_unsupported_schemas_are_refused_before_anything_is_generated(chatting: Server) -> None:
    refused = [each for each in bounded_schemas() if each.unsupported]
    assert len(refused) > 80
    with httpx.Client(base_url=chatting.url, timeout=PATIENCE) as http:
        before = gauge(http.get("/metrics").text, "penstock_prompt_tokens_total")
        for schema, keyword in refused:
            wanted = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema, "strict": True}}
            body = {"messages": [{"role": "user", "content": "hi"}], "response_format": wanted, "max_tokens": 1}
            answer = http.post("/v1/chat/completions", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "invalid_grammar", answer.text
            assert f"the keyword {keyword!r} at " in error["message"]
        assert gauge(http.get("/metrics").text, "penstock_prompt_tokens_total") == before
