"""The real `openai` client against a real uvicorn."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from tests.frontend.conftest import NAME, Site, live
from tests.frontend.http.raw import event_loop_policy

__all__ = ["event_loop_policy"]

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live(site) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [NAME]
    assert (await client.models.retrieve(NAME)).owned_by == "penstock"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_completion(site: Site, client: openai.AsyncOpenAI) -> None:
    site.says("hello wörld stop")
    answer = await client.completions.create(
        model=NAME,
        prompt="x",
        stop=["stop"],
        n=2,
        logprobs=1,
        seed=3,
        max_tokens=40,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    assert [choice.text for choice in answer.choices] == ["hello wörld "] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(answer.choices[0].logprobs.tokens)
    assert site.engine.requests[0].sampling.top_k == 5


async def test_completion_stream(site: Site, client: openai.AsyncOpenAI) -> None:
    site.says("hello wörld")
    stream = await client.completions.create(
        model=NAME, prompt="x", stream=True, max_tokens=40, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello wörld"
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_chat(site: Site, client: openai.AsyncOpenAI) -> None:
    site.says("hello wörld")
    site.engine.cached_tokens = 4
    answer = await client.chat.completions.create(
        model=NAME, messages=USER, logprobs=True, top_logprobs=2, max_completion_tokens=30, user="me", n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["hello wörld"] * 2
    assert answer.choices[0].message.role == "assistant"
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize("content", ["hello wörld", [{"type": "text", "text": "hello wörld"}]])
async def test_a_prediction_reaches_the_engine(site: Site, client: openai.AsyncOpenAI, content: Any) -> None:
    site.says("hello wörld")
    site.engine.predicted = (5, 2)
    answer = await client.chat.completions.create(
        model=NAME, messages=USER, prediction={"type": "content", "content": content}, n=2
    )
    assert site.engine.requests[0].prediction_ids == tuple(site.tokenizer.encode("hello wörld"))
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 4)


async def test_chat_stream(site: Site, client: openai.AsyncOpenAI) -> None:
    site.says("hello wörld", cuts=(2,))
    async with client.chat.completions.stream(
        model=NAME, messages=USER, stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello wörld"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None and final.usage.total_tokens > 0
    assert "".join(event.delta for event in events if event.type == "content.delta") == "hello wörld"


async def test_errors_are_the_clients_exceptions(site: Site, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=NAME, messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    site.engine.row_error_after = 2
    stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
    with pytest.raises(openai.APIError) as failed:
        async for _ in stream:
            pass
    assert failed.value.code == "generation_failed"
    site.engine.row_error_after = None
    assert (await client.completions.create(model=NAME, prompt="x")).choices[0].finish_reason == "length"


async def test_an_api_key(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    async with live(site) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            assert (await client.completions.create(model=NAME, prompt="x")).choices[0].text
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model=NAME, prompt="x")
