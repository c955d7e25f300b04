"""A suffix: what a model with fill-in-the-middle tokens reads, and an error of the others, through real clients."""

import json
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.config import ServerConfig
from penstock.frontend import ServedModel
from penstock.observe.metrics import Metrics
from penstock.text import Tokenizer
from tests.frontend.conftest import NAME, Site, app_of, live
from tests.frontend.scripted import ScriptedClient

SPACE = "▁"
FAMILIES = {  # the special tokens of a family, and its prompt for BEFORE and AFTER
    "qwen2.5-coder": (
        ("<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"),
        "<|fim_prefix|>BEFORE<|fim_suffix|>AFTER<|fim_middle|>",
    ),
    "starcoder2": (
        ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "<fim_prefix>BEFORE<fim_suffix>AFTER<fim_middle>",
    ),
    "deepseek-coder": (
        ("<｜begin▁of▁sentence｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜begin▁of▁sentence｜><｜fim▁begin｜>BEFORE<｜fim▁hole｜>AFTER<｜fim▁end｜>",
    ),
    "codestral": (("<s>", "[PREFIX]", "[SUFFIX]"), "<s>[SUFFIX]AFTER[PREFIX]BEFORE"),
}


def load(folder: Path, backend: Backend, special: tuple[str, ...]) -> Tokenizer:
    """A tokenizer with these special tokens. A first one that begins a sentence is put before each text."""
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if special[0] in ("<s>", "<｜begin▁of▁sentence｜>"):
        number = backend.token_to_id(special[0])
        backend.post_processor = processors.TemplateProcessing(f"{special[0]} $A", None, [(special[0], number)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer.load(folder)


def byte_level(folder: Path, special: tuple[str, ...]) -> Tokenizer:
    backend = Backend(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return load(folder, backend, special)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_that_of_the_models_card(tmp_path: Path, family: str) -> None:
    special, card = FAMILIES[family]
    tokenizer = byte_level(tmp_path, special)
    ids = tokenizer.encode_infill("def f(", "):\n  return é")
    assert tokenizer.decode(ids, skip_special_tokens=False) == card.replace("BEFORE", "def f(").replace(
        "AFTER", "):\n  return é"
    )
    marks = [text for text in special if text in card and text[:2] != "<s" and "begin▁of" not in text]
    alone = tokenizer.encode_infill("", "", add_special_tokens=False)
    assert sorted(map(tokenizer.token, alone)) == sorted(marks)


def test_codellama_puts_no_space_before_the_suffix(tmp_path: Path) -> None:
    """Its paper: the suffix goes on where the middle ends, so the space that SentencePiece adds would be wrong."""
    characters = {char: i for i, char in enumerate([SPACE, *"abcdefghijklmnop():\n☺"])}
    backend = Backend(models.BPE(characters, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="first")
    special = ("<s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    tokenizer = load(tmp_path, backend, special)
    tokens = [backend.id_to_token(i) for i in tokenizer.encode_infill("def", "end")]
    assert tokens == ["<s>", "▁<PRE>", SPACE, *"def", "▁<SUF>", *"end", "▁<MID>"]
    assert tokenizer.infill is not None and tokenizer.infill.ends == (backend.token_to_id("▁<EOT>"),)


def coder(folder: Path) -> Site:
    tokenizer = byte_level(folder, FAMILIES["qwen2.5-coder"][0])
    eos = tokenizer.encode("<|endoftext|>")[0]
    engine = ScriptedClient(
        lambda request, choice: [*tokenizer.encode("x, y"), tokenizer.encode("<|file_sep|>")[0]],
        vocab_size=tokenizer.vocab_size,
        eos=eos,
        max_model_len=256,
    )
    model = ServedModel(name=NAME, client=engine, tokenizer=tokenizer, created=1)
    metrics = Metrics(CollectorRegistry())
    app = app_of(model, ServerConfig(served_model_name=NAME), metrics)
    return Site(app, engine, tokenizer, metrics, httpx.AsyncClient())


async def test_clients_of_openai_and_ollama(tmp_path: Path) -> None:
    site = coder(tmp_path)
    card = FAMILIES["qwen2.5-coder"][1].replace("BEFORE", "def f(").replace("AFTER", "):")
    fields: dict[str, Any] = {"model": NAME, "prompt": "def f(", "suffix": "):"}
    async with live(site) as port:
        url = f"http://127.0.0.1:{port}"
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused") as client:
            whole = await client.completions.create(**fields, max_tokens=40)
            chunks = [chunk async for chunk in await client.completions.create(**fields, max_tokens=40, stream=True)]
            with pytest.raises(openai.BadRequestError, match="echo excludes suffix"):
                await client.completions.create(**fields, echo=True)
            with pytest.raises(openai.BadRequestError, match="a prompt that is a text"):
                await client.completions.create(model=NAME, prompt=[1, 2], suffix=")")
            with pytest.raises(openai.BadRequestError, match="prompt and suffix has"):
                await client.completions.create(model=NAME, prompt="x", suffix=")" * 70_000)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("x, y", "stop")
        assert "".join(chunk.choices[0].text for chunk in chunks) == "x, y"
        insert = ollama.AsyncClient(host=url)
        assert (await insert.generate(**fields)).response == "x, y"
        assert "insert" in (await insert.show(NAME)).capabilities
    prompts = {site.tokenizer.decode(asked.prompt_ids, skip_special_tokens=False) for asked in site.engine.requests}
    assert prompts == {card} and len(site.engine.requests) == 3


async def test_a_model_without_the_tokens_refuses(site: Site) -> None:
    openai_error = await site.http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    ollama_error = await site.http.post("/api/generate", json={"model": NAME, "prompt": "a", "suffix": "b"})
    for answer in (openai_error, ollama_error):
        assert answer.status_code == 400 and "does not support insert" in answer.text
    assert openai_error.json()["error"]["param"] == "suffix" and not site.engine.requests
    assert (await site.post("/v1/completions", prompt="a", suffix="", max_tokens=1))["choices"]
