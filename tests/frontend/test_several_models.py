"""Several models in one app, each with an engine of its own: every wire answers with the one that a request names."""

import asyncio
import contextlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect

from penstock.config import ServerConfig
from penstock.engine.link.ipc import spawn
from penstock.frontend import ModelRegistry, ServedModel, Serving, create_app, serve
from penstock.frontend.http.access import Access
from penstock.observe.metrics import Metrics
from penstock.prepare.model import prepare
from penstock.prepare.served import served_model
from penstock.weights.packaged import MINILM
from tests.frontend.conftest import Site, listening
from tests.frontend.scripted import ScriptedClient
from tests.frontend.test_batches import begin, ended, line
from tests.patience import PATIENCE, until
from tests.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": "16MB", "threads": 1}
EMBEDDER = "embedder"
NAMES = ["first", "second", "also-second", EMBEDDER]
PROMPT = "The pipe"
QUESTION = "What is a penstock?"
CHAT = [{"role": "user", "content": QUESTION}]
LENGTH = 6  # tokens of an answer
GREEDY = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
LIMIT = {"num_predict": LENGTH, "temperature": 0}


async def started(model: str, names: str, *, pools: bool = False) -> ServedModel:
    prepared = prepare(model, {**SETTINGS, "served_model_name": names}, pools=pools)
    return served_model(prepared.answers, await spawn(prepared.resolved.engine))


class Server:
    """A server of three models, and a client."""

    def __init__(self, app: Access, http: httpx.AsyncClient, port: int, grpc_port: int) -> None:
        self.app, self.http, self.port, self.grpc_port = app, http, port, grpc_port

    async def post(self, path: str, **fields: Any) -> Any:
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, path: str, **headers: str) -> Any:
        answer = await self.http.get(path, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    state_dir = str(tmp_path_factory.mktemp("state"))
    metrics, config = Metrics(CollectorRegistry()), ServerConfig(served_model_name="first", state_dir=state_dir)
    models = await asyncio.gather(
        started(str(tiny_checkpoint("qwen3")), "first"),
        started(str(tiny_checkpoint("qwen3", seed=1)), "second,also-second"),
        started(MINILM.name, EMBEDDER, pools=True),
    )
    registry = ModelRegistry(*(Serving(model, metrics) for model in models))
    app = create_app(registry, config, metrics)
    sock, stop, grpc_port, beside = listening(), asyncio.Event(), free_port(), None
    with contextlib.suppress(ImportError):
        from penstock.frontend.kserve.grpc import GRPCServer

        beside = GRPCServer(app, "127.0.0.1", grpc_port)
    port = sock.getsockname()[1]
    running = asyncio.create_task(serve(app, sock, stop=stop, beside=beside))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield Server(app, http, port, grpc_port)
    finally:
        stop.set()
        await asyncio.wait_for(running, PATIENCE)
    assert {model.client.state.status for model in models} == {"ended"}


async def continued(server: Server, name: str) -> list[str]:
    """What each wire makes of PROMPT."""
    raw = {"model": name, "prompt": PROMPT, "raw": True, "stream": False, "options": LIMIT}
    infer = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]}
    kserve = f"/v2/models/{name}"
    return [
        (await server.post("/v1/completions", model=name, prompt=PROMPT, **GREEDY))["choices"][0]["text"],
        (await server.post("/api/generate", **raw))["response"],
        (await server.post(kserve + "/generate", text_input=PROMPT, parameters=GREEDY))["text_output"],
        (await server.post(kserve + "/infer", **infer, parameters=GREEDY))["outputs"][0]["data"][0],
    ]


async def answered(server: Server, name: str) -> list[str]:
    """What each wire for chats makes of CHAT."""
    asked = {"model": name, "messages": CHAT, "max_tokens": LENGTH, "temperature": 0}
    response = await server.post("/v1/responses", model=name, input=QUESTION, max_output_tokens=LENGTH, temperature=0)
    ollama = await server.post("/api/chat", model=name, messages=CHAT, stream=False, options=LIMIT)
    async with connect(f"ws://127.0.0.1:{server.port}/v1/chat/ws") as opened:
        await opened.send(json.dumps({"id": "1", "body": asked}))
        message = json.loads(await asyncio.wait_for(opened.recv(), 60))
    return [
        (await server.post("/v1/chat/completions", **asked))["choices"][0]["message"]["content"],
        message["completion"]["choices"][0]["message"]["content"],
        response["output"][0]["content"][0]["text"],
        (await server.post("/v1/messages", **asked))["content"][0]["text"],
        ollama["message"]["content"],
    ]


async def answers_of(server: Server) -> dict[str, int]:
    """How many answers of full length each model has given."""
    counter = re.compile(r'penstock_request_success_total{finished_reason="length",model_name="(.+)"} (.+)')
    return {name: int(float(count)) for name, count in counter.findall((await server.http.get("/metrics")).text)}


async def test_every_wire_answers_with_the_model_that_is_named(server: Server) -> None:
    texts, replies, before = {}, {}, await answers_of(server)
    for name in NAMES[:3]:
        [texts[name], *same] = await continued(server, name)
        assert set(same) == {texts[name]}
        [replies[name], *same] = await answered(server, name)
        assert set(same) == {replies[name]}
    assert texts["first"] != texts["second"] == texts["also-second"]
    assert replies["first"] != replies["second"] == replies["also-second"]
    tgi = {"max_new_tokens": LENGTH}
    assert (await server.post("/generate", inputs=PROMPT, parameters=tgi))["generated_text"] == texts["first"]
    assert (await server.post("/v1/completions", prompt=PROMPT, **GREEDY))["choices"][0]["text"] == texts["first"]
    versions = {name: model["fingerprint"] for name, model in (await listed(server)).items()}
    for name in ("first", "second"):
        answer = await server.post("/v1/completions", model=name, prompt=PROMPT, **GREEDY)
        assert (answer["model"], answer["system_fingerprint"]) == (name, versions[name])
    counts = {name: number - before[name] for name, number in (await answers_of(server)).items()}
    assert counts == {"first": 12, "second": 19, EMBEDDER: 0}


async def test_grpc_answers_with_the_model_that_is_named(server: Server) -> None:
    grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
    from tests.frontend.kserve.test_grpc import MESSAGES, infer, request

    texts = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for name in ("first", "second"):
            asked = request(PROMPT, max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
            asked.model_name = name
            (raw,) = (await infer(channel, asked)).raw_output_contents
            assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
            texts.append(raw[4:].decode())
            assert texts[-1] == (await continued(server, name))[0]
        index = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryIndex",
            MESSAGES["Repository"].SerializeToString,
            MESSAGES["Index"].FromString,
        )
        assert [model.name for model in (await index(MESSAGES["Repository"]())).models] == NAMES
    assert texts[0] != texts[1]


async def test_vectors_tokens_and_batches(server: Server) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": ["a"]}),
        ("/api/embed", {"input": ["a"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert (await server.post(path, model=EMBEDDER, **fields))["model"] == EMBEDDER
        refused = await server.http.post(path, json={"model": "second", **fields})
        assert refused.status_code == 400 and "'second' generates text" in refused.text
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        refused = await server.http.post(path, json={"model": EMBEDDER, **fields})
        assert refused.status_code == 400 and f"'{EMBEDDER}' embeds texts and generates none" in refused.text
    lengths = {name: (await server.post("/tokenize", model=name, prompt="river")) for name in NAMES}
    assert lengths["first"]["tokens"] == lengths["second"]["tokens"] != lengths[EMBEDDER]["tokens"]
    ids = lengths[EMBEDDER]["tokens"]
    assert "river" in (await server.post("/detokenize", model=EMBEDDER, tokens=ids))["prompt"]
    assert (await server.http.post("/detokenize", json={"model": "first", "tokens": ids})).status_code == 400
    counted = await server.post("/v1/messages/count_tokens", model="second", messages=CHAT)
    assert counted == {"input_tokens": len((await server.post("/tokenize", model="second", messages=CHAT))["tokens"])}

    names = ("first", "second", EMBEDDER, "third")
    batch = await ended(
        server.http,
        (await begin(server.http, b"".join(line(n, model=n, max_tokens=LENGTH, temperature=0) for n in names)))["id"],
    )
    found = (await server.http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    failed = (await server.http.get(f"/v1/files/{batch['error_file_id']}/content")).text
    lines = {row["custom_id"]: row["response"] for row in map(json.loads, (found + failed).splitlines())}
    assert {name: row["status_code"] for name, row in lines.items()} == {
        **dict.fromkeys(("first", "second"), 200),
        EMBEDDER: 400,
        "third": 404,
    }
    assert [lines[name]["body"]["model"] for name in ("first", "second")] == ["first", "second"]


async def listed(server: Server) -> dict[str, Any]:
    return {model["id"]: model for model in (await server.get("/v1/models"))["data"]}


async def test_every_wire_lists_all_models(server: Server) -> None:
    models = await listed(server)
    assert [*models] == NAMES
    assert [model["root"] for model in models.values()] == ["first", "second", "second", EMBEDDER]
    anthropic = await server.get("/v1/models", **{"anthropic-version": "2023-06-01"})
    assert [model["id"] for model in anthropic["data"]] == NAMES and anthropic["last_id"] == NAMES[-1]
    tags = (await server.get("/api/tags"))["models"]
    assert [model["name"] for model in tags] == [f"{name}:latest" for name in NAMES]
    assert len({model["digest"] for model in tags}) == 3
    running = (await server.get("/api/ps"))["models"]
    assert [model["name"] for model in running] == ["first:latest", "second:latest", f"{EMBEDDER}:latest"]
    assert [model["name"] for model in await server.post("/v2/repository/index")] == NAMES
    assert (await server.get("/info"))["model_id"] == "first"
    for name in NAMES:
        assert (await server.get(f"/v1/models/{name}"))["max_model_len"] == models[name]["max_model_len"]
        assert (await server.get(f"/v2/models/{name}/ready")) == {"name": name, "ready": True}
        shown = await server.post("/api/show", model=f"{name}:latest")
        assert shown["capabilities"][0] == ("embedding" if name == EMBEDDER else "completion")
    missing = await server.http.post("/v1/completions", json={"model": "third", "prompt": PROMPT})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == (
        f"model 'third' is not served here; this server has 'first', 'second', '{EMBEDDER}'"
    )


async def test_two_models_cannot_have_the_same_name(site: Site) -> None:
    def model(name: str, *aliases: str) -> Serving:
        served = ServedModel(name=name, client=site.engine, tokenizer=site.tokenizer, created=1, aliases=aliases)
        return Serving(served, Metrics(CollectorRegistry()))

    assert ModelRegistry(model("a", "b"), model("c")).names() == ["a", "b", "c"]
    with pytest.raises(ValueError, match="two models have the same name: a, b, c, b"):
        ModelRegistry(model("a", "b"), model("c", "b"))


async def test_a_reload_of_one_model_holds_no_request_for_another(site: Site) -> None:
    metrics = Metrics(CollectorRegistry())

    def model(name: str) -> ServedModel:
        info = site.engine.info
        client = ScriptedClient(lambda request, choice: [30], vocab_size=info.vocab_size, eos=info.eos_token_ids[0])
        return ServedModel(name=name, client=client, tokenizer=site.tokenizer, created=1)

    first, second = (Serving(model(name), metrics) for name in ("first", "second"))
    app = create_app(ModelRegistry(first, second), ServerConfig(state_dir="none"), metrics)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")

    async def ask(name: str) -> httpx.Response:
        return await http.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 2})

    await first.hold()
    waiting = [asyncio.create_task(ask("first")) for _ in range(2)]
    assert (await ask("second")).json()["model"] == "second"
    assert not any(task.done() for task in waiting)
    first.exchange(model("renamed"))
    first.release()
    for task in waiting:
        refused = await task
        assert refused.status_code == 404 and "this server has 'renamed', 'second'" in refused.text
    assert (await ask("renamed")).json()["model"] == "renamed"
    await until(lambda: not second.version.requests)


async def test_pages_read_the_facts_of_a_model(server: Server) -> None:
    assert (await server.get("/server_info"))["model"] == "first"
    assert (await server.get("/server_info?model=also-second"))["model"] == "second"
    await server.post("/v1/completions", model="second", prompt=PROMPT, **GREEDY)
    loads = [await server.get(f"/server_load?model={name}") for name in ("first", "second")]
    assert loads[1]["counters"]["generation_tokens"] >= LENGTH and loads[0]["counters"] != loads[1]["counters"]
    assert (await server.http.get("/server_info?model=nowhere")).status_code == 404
