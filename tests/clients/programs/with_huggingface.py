"""`huggingface_hub.InferenceClient`, whatever its version: text_generation with details and streams, chats without a
model's name.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
from typing import Any

from arguments import GATEWAY, MODEL, SERVER
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

PROMPT = "The capital of France is"


def sync(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12)
    assert "Paris" in text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text
    details: dict[str, Any] = {"max_new_tokens": 12, "details": True}
    whole = client.text_generation(PROMPT, **details)
    assert whole.generated_text == text and whole.details.generated_tokens == 12
    if not GATEWAY:
        whole = client.text_generation(PROMPT, **details, decoder_input_details=True, top_n_tokens=2)
        assert len(whole.details.tokens) == len(whole.details.top_tokens) == 12 and whole.details.prefill
    events = list(client.text_generation(PROMPT, max_new_tokens=12, details=True, stream=True))
    assert events[-1].generated_text == text and events[-1].details.finish_reason == "length"
    assert "".join(event.token.text for event in events) == text and events[-1].details.generated_tokens == 12
    refused: list[tuple[str, dict[str, Any]]] = [("max_new_tokens is 0", {"max_new_tokens": 0})]
    if GATEWAY:
        lacking: dict[str, Any] = {"top_n_tokens": 2, "truncate": 2, "decoder_input_details": True}
        refused += [(name, {"details": True, name: value}) for name, value in lacking.items()]
    for says, wrong in refused:
        raised = ""
        try:
            client.text_generation(PROMPT, **wrong)
        except ValidationError as error:
            raised = str(error)
        assert says in raised, (says, raised)


def chats(client: InferenceClient) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 10,
        "temperature": 0,
    }
    answer = client.chat_completion(**fields)
    assert answer.model == MODEL and answer.choices[0].message.content
    stream = client.chat_completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
    named = InferenceClient(base_url=SERVER).chat.completions.create(**fields)
    assert named.choices[0].message.content == answer.choices[0].message.content


async def asynchronous(client: AsyncInferenceClient) -> None:
    stream = await client.text_generation(PROMPT, max_new_tokens=8, stream=True)
    assert "".join([part async for part in stream])


sync(InferenceClient(model=SERVER))
chats(InferenceClient(model=SERVER))
asyncio.run(asynchronous(AsyncInferenceClient(model=SERVER)))
