"""`huggingface_hub.InferenceClient`, whatever its version: text_generation with details and streams, chats without a
model's name.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
from typing import Any

from arguments import MODEL, SERVER
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

PROMPT = "The capital of France is"


def sync(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12)
    assert "Paris" in text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text
    whole = client.text_generation(PROMPT, max_new_tokens=12, details=True, decoder_input_details=True, top_n_tokens=2)
    assert whole.details.generated_tokens == len(whole.details.tokens) == 12 and whole.details.prefill
    events = list(client.text_generation(PROMPT, max_new_tokens=12, details=True, stream=True))
    assert events[-1].generated_text == text and events[-1].details.finish_reason == "length"
    raised = False
    try:
        client.text_generation(PROMPT, max_new_tokens=0)
    except ValidationError as error:
        raised = "max_new_tokens is 0" in str(error)
    assert raised


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
