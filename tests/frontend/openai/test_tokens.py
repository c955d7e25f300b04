"""/tokenize and /detokenize."""

import pytest

from tests.frontend.conftest import Site


@pytest.mark.parametrize("text", ["hello world", "Größe 👍🏽", "a\x00b", "<|im_start|>"])
async def test_there_and_back(site: Site, text: str) -> None:
    answer = await site.post("/tokenize", prompt=text)
    assert answer == {
        "count": len(site.tokenizer.encode(text)),
        "max_model_len": 64,
        "tokens": site.tokenizer.encode(text),
        "token_strs": None,
    }
    assert await site.post("/detokenize", tokens=answer["tokens"]) == {"prompt": text}


async def test_token_strings(site: Site) -> None:
    answer = await site.post("/tokenize", prompt="hello", return_token_strs=True)
    assert "".join(answer["token_strs"]) == "hello"


async def test_messages_as_a_chat_would_send_them(site: Site) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = await site.post("/tokenize", messages=messages)
    await site.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert tuple(answer["tokens"]) == site.engine.requests[0].prompt_ids
    shorter = await site.post("/tokenize", messages=messages, add_generation_prompt=False)
    assert shorter["tokens"] == answer["tokens"][: shorter["count"]]
    assert shorter["count"] < answer["count"]


async def test_a_text_longer_than_the_context_can_be_counted(site: Site) -> None:
    answer = await site.post("/tokenize", prompt="y " * 4500)  # tokenised off the event loop
    assert answer["count"] > site.engine.info.max_model_len


async def test_no_tokens_are_no_text(site: Site) -> None:
    assert await site.post("/detokenize", tokens=[]) == {"prompt": ""}
