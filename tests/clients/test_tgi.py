"""TGI's wire with the unmodified InferenceClient of huggingface_hub and SmolLM2."""

import json
from typing import Any

import jsonschema
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from tests.e2e.server import Server

PROMPT = "The capital of France is"


@pytest.fixture
def client(server: Server) -> InferenceClient:
    return InferenceClient(model=server.url)


def test_text_and_its_stream_are_the_same(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12)
    assert "Paris" in text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text
    assert client.text_generation(PROMPT, max_new_tokens=12, return_full_text=True) == PROMPT + text


def test_details_and_those_of_a_stream_are_the_same(client: InferenceClient) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 30, "details": True, "top_n_tokens": 2, "stop": [".", "never said"]}
    whole = client.text_generation(PROMPT, decoder_input_details=True, **fields)
    details = whole.details
    assert (details.finish_reason, details.generated_tokens) == ("stop_sequence", len(details.tokens))
    assert whole.generated_text.endswith(".")  # as in TGI
    assert "".join(token.text for token in details.tokens) == whole.generated_text
    assert "".join(token.text for token in details.prefill) and details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:] + details.tokens)
    assert [top[0]["id"] for top in details.top_tokens] == [token.id for token in details.tokens]
    events = list(client.text_generation(PROMPT, stream=True, **fields))
    assert [(event.token.id, event.token.logprob) for event in events] == [
        (token.id, token.logprob) for token in details.tokens
    ]
    assert "".join(event.token.text for event in events) == whole.generated_text  # stop strings may delay text
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert [event.generated_text for event in events] == [None] * (len(events) - 1) + [whole.generated_text]
    last = events[-1].details
    assert (last.finish_reason, last.generated_tokens) == ("stop_sequence", len(events))
    assert last.input_length == len(details.prefill) and all(event.details is None for event in events[:-1])


def test_the_end_of_sequence_is_a_special_token(server: Server) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of Germany?<|im_end|>\n<|im_start|>assistant\n"
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 100, "details": True}}
    answer = server.post("/generate", body).json()
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["tokens"][-1] == {**answer["details"]["tokens"][-1], "special": True, "text": ""}
    stream = server.post("/generate_stream", body).text
    last = json.loads(stream.split("\n\n")[-2].removeprefix("data: "))
    assert last["generated_text"] == answer["generated_text"] and last["token"]["special"]


def test_an_answer_matches_a_grammar(client: InferenceClient) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for grammar in (
        {"type": "json", "value": schema},
        {"type": "json_schema", "value": {"name": "a", "schema": schema}},
    ):
        jsonschema.validate(json.loads(client.text_generation("n:", grammar=grammar, max_new_tokens=30)), schema)
    regex = {"type": "regex", "value": "[0-9]{4}"}
    assert client.text_generation("The year is", grammar=regex, max_new_tokens=30).isdigit()


def test_sampling_needs_a_temperature_or_do_sample(client: InferenceClient) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 20}
    assert client.text_generation(PROMPT, **fields, seed=1) == client.text_generation(PROMPT, **fields, seed=2)
    texts = {client.text_generation("Once", **fields, do_sample=True, seed=seed) for seed in range(3)}
    assert len(texts) > 1


def test_a_chat_that_names_no_model(client: InferenceClient, server: Server) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    answer = client.chat_completion(messages, max_tokens=10, temperature=0)
    assert answer.model == "smollm2" and answer.choices[0].message.content
    streamed = client.chat_completion(messages, max_tokens=10, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == answer.choices[0].message.content
    named = InferenceClient(base_url=server.url).chat.completions.create(
        messages=messages, max_tokens=10, temperature=0
    )
    assert named.choices[0].message.content == text


async def test_the_asynchronous_client(server: Server) -> None:
    client = AsyncInferenceClient(model=server.url)
    text = await client.text_generation(PROMPT, max_new_tokens=8)
    stream = await client.text_generation(PROMPT, max_new_tokens=8, stream=True)
    assert "".join([part async for part in stream]) == text


def test_errors_are_the_clients_own(client: InferenceClient) -> None:
    for fields, message in (
        ({"max_new_tokens": 0}, "parameters.max_new_tokens is 0"),
        ({"stop": ["a"] * 50}, "stop has 50 strings"),
        ({"best_of": 4}, "parameters.best_of is not supported"),
        ({"truncate": 0}, "parameters.truncate is 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            client.text_generation(PROMPT, **fields)


def test_info(server: Server) -> None:
    info = server.get("/info").json()
    assert info["model_id"] == "smollm2" and info["max_total_tokens"] == info["max_input_tokens"] + 1
