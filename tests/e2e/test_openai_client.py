"""What a newcomer does, with the client they have: the embedded model behind a real server."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.cli.test_help import penstock
from tests.e2e.server import Server, gauge, status
from tests.patience import PATIENCE, wait_for

CODE = "def area(width, height):\n    "


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_lists_and_retrieves_the_model(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing-of-that-name")


def test_completes_greedily_and_again_the_same(client: openai.OpenAI, model: str) -> None:
    answers = [client.completions.create(model=model, prompt=CODE, max_tokens=24, temperature=0) for _ in range(2)]
    assert answers[0].choices[0].text == answers[1].choices[0].text != ""
    assert answers[0].choices[0].finish_reason in ("length", "stop")
    usage = answers[0].usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=CODE, max_tokens=32, seed=7, temperature=1.0)
    stream = client.completions.create(
        model=model,
        prompt=CODE,
        max_tokens=32,
        seed=7,
        temperature=1.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []


def test_chats_and_streams_with_usage(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "add two numbers"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_choices_differ_and_are_reproducible(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": CODE, "max_tokens": 24, "n": 4, "seed": 11, "temperature": 1.2}
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in second.choices]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt=CODE, max_tokens=40, temperature=0).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    stopped = client.completions.create(model=model, prompt=CODE, max_tokens=40, temperature=0, stop=[stop]).choices[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_agree_between_dialects_and_with_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=CODE, max_tokens=5, temperature=0, logprobs=3).choices[0]
    assert len(answer.logprobs.tokens) == len(answer.logprobs.token_logprobs) == 5
    assert "".join(answer.logprobs.tokens) == answer.text
    for token, logprob, top in zip(
        answer.logprobs.tokens, answer.logprobs.token_logprobs, answer.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob) and logprob == pytest.approx(max(top.values()))
    # Scoring the whole text with echo gives the same numbers, without generating anything.
    scored = client.completions.create(model=model, prompt=CODE + answer.text, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == CODE + answer.text
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert sum(scored.choices[0].logprobs.token_logprobs[1:]) < 0


def test_a_shared_prefix_is_reported_as_cached_for_the_same_salt_only(
    client: openai.OpenAI, model: str, server: Server
) -> None:
    text = "\n".join(f"value_{i} = compute({i}, other={i * 7})" for i in range(200))
    ids = server.post("/tokenize", {"model": model, "prompt": text}).json()["tokens"][:1024]
    assert len(ids) == 1024

    def cached(tail: int, salt: str) -> int:
        answer = client.completions.create(
            model=model, prompt=[*ids, tail, tail], max_tokens=2, temperature=0, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(50, "one") == 0
    assert cached(60, "one") >= 1008
    assert cached(70, "two") == 0


def test_tokenize_and_detokenize_are_inverse(model: str, server: Server) -> None:
    text = "def naïve(x):\n\treturn '🙂' * x\n"
    answer = server.post("/tokenize", {"model": model, "prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert server.post("/detokenize", {"model": model, "tokens": answer["tokens"]}).json()["prompt"] == text


async def test_many_at_once_say_what_each_says_alone(model: str, server: Server) -> None:
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    prompts = [f"class Point{i}:\n    def __init__(self" for i in range(24)]

    async def ask(prompt: str, salt: str) -> str:
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=16, temperature=0, extra_body={"cache_salt": salt}
        )
        return answer.choices[0].text

    together = await asyncio.gather(*(ask(prompt, "together") for prompt in prompts))
    alone = [await ask(prompt, f"alone {i}") for i, prompt in enumerate(prompts)]
    assert all(together)
    assert together == alone  # on a CPU, tokens do not depend on what else is in the batch


def test_metrics_carry_both_names(client: openai.OpenAI, model: str, server: Server) -> None:
    before = server.get("/metrics").text
    client.completions.create(model=model, prompt=CODE, max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
    after = server.get("/metrics").text
    for prefix in ("penstock_", "vllm:"):
        name = prefix + "generation_tokens_total"
        assert gauge(after, name) - gauge(before, name) == 8
        assert gauge(after, prefix + "time_to_first_token_seconds_count") > gauge(
            before, prefix + "time_to_first_token_seconds_count"
        )


def test_a_client_that_goes_away_is_aborted(model: str, server: Server) -> None:
    before = gauge(server.get("/metrics").text, "penstock_generation_tokens_total")
    body = {"model": model, "prompt": CODE, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        running = gauge(server.get("/metrics").text, "penstock_num_requests_running")
        assert running >= 1
    wait_for(
        lambda: gauge(server.get("/metrics").text, "penstock_num_requests_running") == 0,
        "the abandoned request to leave",
    )
    assert gauge(server.get("/metrics").text, "penstock_generation_tokens_total") < before + 1500


def test_errors_have_four_keys_and_the_server_stays_well(client: openai.OpenAI, model: str, server: Server) -> None:
    answer = server.post("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 10**9})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="x", temperature=-1)
    assert client.completions.create(model=model, prompt="x", max_tokens=1).choices


def test_a_raw_stream_ends_with_done_once(model: str, server: Server) -> None:
    body = {"model": model, "prompt": CODE, "max_tokens": 3, "stream": True}
    lines = [line for line in server.post("/v1/completions", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    for line in lines[:-1]:
        json.loads(line.removeprefix("data: "))


def test_a_second_server_on_the_port_is_told_of_the_clash_alone(server: Server) -> None:
    done = penstock("serve", "--port", server.url.rpartition(":")[2], "--threads", "1", "--kv-cache-memory", "32MiB")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "penstock" in line or "ERROR" in line or "Traceback" in line]
    assert len(said) == 1 and "is in use by process" in said[0] and "choose another --port" in said[0]
    assert status(server.url + "/readyz") == 200
