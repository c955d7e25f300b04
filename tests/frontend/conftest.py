"""A small real tokenizer, a scripted engine, and the app over both."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from penstock.cli.address import bind, listen
from penstock.config import ServerConfig
from penstock.config.facts import PoolingFacts
from penstock.frontend import ModelRegistry, RequestLimits, ServedModel, Serving, create_app, serve
from penstock.frontend.http.access import Access
from penstock.observe.metrics import Metrics
from penstock.text import ChatTemplate, Tokenizer
from tests.described import check_described
from tests.frontend.scripted import Output, ScriptedClient
from tests.patience import PATIENCE

NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REASONING_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{{ reasoning_effort }}{% endif %}"
)
KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_MARKERS = ("<|im_start|>", "<|im_end|>", "<|pad|>", *KIMI, "<|tool_calls_section_end|>")
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """Byte-level BPE with few merges, so that tokens are short and most characters outside ASCII are several.

    With a chat template, and without.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=266,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, this is a test of the stop string"] * 4, trainer)
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    loaded = []
    for more in ({"chat_template": TEMPLATE}, {}):
        folder: Path = tmp_path_factory.mktemp("tokenizer")
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
        loaded.append(Tokenizer.load(folder))
    return loaded[0], loaded[1]


@dataclass
class Site:
    """An app, the engine behind it, and a client that calls the app directly."""

    app: Access
    engine: ScriptedClient
    tokenizer: Tokenizer
    metrics: Metrics
    http: httpx.AsyncClient

    @property
    def serving(self) -> Serving:
        """The one model."""
        return self.app.models.default

    async def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        response = await self.http.post(path, json={"model": NAME, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **fields: Any) -> list[Any]:
        """The events of a stream that must succeed; see `parse_events`."""
        response = await self.http.post(path, json={"model": NAME, "stream": True, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(response.content)

    def says(self, text: str, *, cuts: tuple[int, ...] = (1,), ends: bool = True) -> list[int]:
        """Makes the engine say this, then EOS unless `ends` is false. Returns the ids."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        eos = [self.engine.info.eos_token_ids[0]] if ends else []
        self.engine.output = lambda request, choice: [*ids, *eos]
        self.engine.cuts = cuts
        return ids


def app_of(model: ServedModel, config: ServerConfig, metrics: Metrics, limits: RequestLimits | None = None) -> Access:
    """An app that serves one model."""
    timeout = (limits or RequestLimits.of(config)).drain_timeout
    return create_app(ModelRegistry(Serving(model, metrics, timeout)), config, metrics, limits)


def client_of(app: Access, timeout: float = 5) -> httpx.AsyncClient:
    """A client whose answers must be those that the OpenAPI document describes."""

    async def check(response: httpx.Response) -> None:
        if response.headers.get("content-type") == "application/json":
            await response.aread()
            check_described(response)

    hooks = {"response": [check]}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=timeout, event_hooks=hooks
    )


def parse_events(body: bytes) -> list[Any]:
    """A stream of server-sent events, by its grammar: `data: JSON` and a blank line, the last one `data: [DONE]`."""
    assert body.endswith(b"\n\n")
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    payloads = [event.removeprefix("data: ") for event in events]
    assert payloads.pop() == "[DONE]"
    assert "[DONE]" not in payloads
    return [json.loads(payload) for payload in payloads]


@pytest.fixture
def make_site(tokenizers: tuple[Tokenizer, Tokenizer]) -> Callable[..., Site]:
    """make_site(output=, limits=, defaults=, aliases=, max_model_len=, template=, pooling=, ServerConfig fields)."""

    def make(
        output: Output = lambda request, choice: [20 + choice],
        *,
        limits: RequestLimits | None = None,
        defaults: dict[str, float] | None = None,
        aliases: tuple[str, ...] = (),
        max_model_len: int = 64,
        template: bool = True,
        pooling: PoolingFacts | None = None,
        **config: Any,
    ) -> Site:
        tokenizer = tokenizers[0 if template else 1]
        eos = tokenizer.encode("<|im_end|>")[0]
        engine = ScriptedClient(output, vocab_size=tokenizer.vocab_size + 5, eos=eos, max_model_len=max_model_len)
        engine.width = 0 if pooling is None else pooling.width
        model = ServedModel(
            name=NAME,
            client=engine,
            tokenizer=tokenizer,
            created=1,
            aliases=aliases,
            defaults=defaults or {},
            pooling=pooling,
        )
        metrics = Metrics(CollectorRegistry())
        settings = ServerConfig(served_model_name=NAME, **{"state_dir": "none", **config})
        app = app_of(model, settings, metrics, limits)
        http = client_of(app)
        return Site(app, engine, tokenizer, metrics, http)

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


def listening() -> socket.socket:
    """A socket that listens on a free port of loopback."""
    sock = bind("127.0.0.1", 0)
    listen(sock)
    return sock


@contextlib.asynccontextmanager
async def live(site: Site) -> AsyncIterator[int]:
    """The app behind a real uvicorn on loopback, as long as the block lasts. Gives the port."""
    sock = listening()
    stop = asyncio.Event()
    running = asyncio.create_task(serve(site.app, sock, stop=stop))
    try:
        yield sock.getsockname()[1]
    finally:
        stop.set()
        await asyncio.wait_for(running, PATIENCE)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte, so that characters outside ASCII are several, and some special tokens."""
    backend = Backend(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True) for text in _MARKERS])
    folder: Path = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": REASONING_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def sites(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., Site]]:
    """sites(tool_format=, reasoning_format=, limits=, budget=, template=). Equal ones share an app, and its process for
    grammars."""
    made: dict[tuple[Any, ...], Site] = {}
    served: list[ServedModel] = []

    def site(
        tools: str = "hermes",
        reasoning: str = "think",
        limits: RequestLimits | None = None,
        budget: int | None = None,
        template: str = "",
    ) -> Site:
        key = (tools, reasoning, limits, budget, template)
        if key not in made:
            tokenizer = byte_tokenizer
            if template:
                tokenizer = copy(byte_tokenizer)
                tokenizer.chat_template = ChatTemplate(template, {})
            eos = byte_tokenizer.encode("<|im_end|>")[0]
            engine = ScriptedClient(
                lambda request, choice: [eos], vocab_size=byte_tokenizer.vocab_size, eos=eos, max_model_len=4096
            )
            model = ServedModel(
                name=NAME,
                client=engine,
                tokenizer=tokenizer,
                created=1,
                tool_format=tools,
                reasoning_format=reasoning,
                thinking_budget=budget,
            )
            served.append(model)
            metrics = Metrics(CollectorRegistry())
            app = app_of(model, ServerConfig(served_model_name=NAME, state_dir="none"), metrics, limits)
            http = client_of(app, timeout=60)
            made[key] = Site(app, engine, tokenizer, metrics, http)
        return made[key]

    yield site
    for model in served:
        model.close()
