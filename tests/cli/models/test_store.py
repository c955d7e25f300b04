"""`penstock serve --manage-models`: Ollama's client pulls, lists and deletes models of the hub's cache."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import ollama
import pytest
from prometheus_client import CollectorRegistry

from penstock.cli.models.store import LocalStore
from penstock.config import ServerConfig
from penstock.frontend import ModelRegistry, ServedModel, Serving, create_app
from penstock.observe.metrics import Metrics
from penstock.text import Tokenizer
from penstock.weights.cached_models import cached_models
from tests.frontend.conftest import NAME, Site, live
from tests.frontend.scripted import ScriptedClient
from tests.patience import PATIENCE, until
from tests.weights.standin_hub import StandInHub

MODEL = "acme/tiny"


@pytest.fixture
def site(tiny_checkpoint: Callable[..., Path]) -> Site:
    """A server of another model, which may change those of the cache."""
    folder = tiny_checkpoint("qwen3")
    tokenizer = Tokenizer.load(folder)
    engine = ScriptedClient(lambda request, choice: [5], vocab_size=tokenizer.vocab_size, eos=0)
    model = ServedModel(name=NAME, client=engine, tokenizer=tokenizer, created=1, path=folder)
    metrics = Metrics(CollectorRegistry())
    serving = Serving(model, metrics)
    store = LocalStore(serving.paths)
    app = create_app(ModelRegistry(serving), ServerConfig(served_model_name=NAME), metrics, store=store)
    return Site(app, engine, tokenizer, metrics, httpx.AsyncClient())


def present() -> set[str]:
    return {model.name for model in cached_models() if model.path is not None}


async def pulled(client: ollama.AsyncClient) -> bool:
    """Whether a pull succeeds; False while another one runs."""
    try:
        return (await client.pull(MODEL)).status == "success"
    except ollama.ResponseError as error:
        if "another model" not in str(error):
            raise
    return False


async def test_pull_list_and_delete(site: Site, dense_hub: StandInHub) -> None:
    async with live(site) as port:
        client = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
        lines = [line async for line in await client.pull(MODEL, stream=True)]
        assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
        bars = [line for line in lines if line.digest]
        assert bars and bars[-1].completed == bars[-1].total == sum(
            len(content) for name, content in dense_hub.files.items() if name.endswith(".safetensors")
        )
        assert present() == {MODEL}
        assert (await client.pull(MODEL)).status == "success"  # nothing is new
        listed = {model.model: model.size for model in (await client.list()).models}
        assert listed[MODEL] > bars[-1].total and f"{NAME}:latest" in listed
        assert (await client.delete(MODEL)).status == "success"
        assert present() == set()
        for call, status, says in (
            (client.delete(MODEL), 404, "not on this machine"),
            (client.delete(NAME), 403, "in use"),
            (client.pull("acme/none"), 400, "acme/none"),
            (client.pull("/etc"), 400, "is a path"),
        ):
            with pytest.raises(ollama.ResponseError, match=says) as error:
                await call
            assert error.value.status_code == status
        with pytest.raises(ollama.ResponseError, match="acme/none"):
            await anext(line async for line in await client.pull("acme/none", stream=True) if line.status == "success")


async def test_a_client_that_goes_ends_the_download_and_the_next_one_goes_on(site: Site, dense_hub: StandInHub) -> None:
    largest = max(dense_hub.files, key=lambda name: len(dense_hub.files[name]))
    half = len(dense_hub.files[largest]) // 2
    dense_hub.stall_after[largest] = half
    async with live(site) as port:
        client = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
        async with asyncio.timeout(PATIENCE):
            async for line in await client.pull(MODEL, stream=True):
                if (line.completed or 0) >= half:
                    break
        with pytest.raises(ollama.ResponseError, match="another model is being pulled"):
            await ollama.AsyncClient(host=f"http://127.0.0.1:{port}").pull(MODEL)
        await client._client.aclose()
        await until(lambda: site.app.lifecycle.requests == 0)
        dense_hub.stall_after.clear()
        dense_hub.go_on.set()
        again = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
        async with asyncio.timeout(PATIENCE):
            while not await pulled(again):  # until the thread has noticed
                await asyncio.sleep(0.1)
        assert present() == {MODEL}


async def test_models_in_use_cannot_be_deleted_by_their_hub_name(site: Site, dense_hub: StandInHub) -> None:
    """After a reload: that is the new model, and the old one while a request still uses it."""
    store = LocalStore(site.serving.paths)
    store.pull(MODEL, lambda done, total: None)
    (found,) = cached_models()
    first, second = (
        ServedModel(
            name=name,
            client=ScriptedClient(lambda request, choice: [5], vocab_size=site.tokenizer.vocab_size, eos=0),
            tokenizer=site.tokenizer,
            created=1,
            path=path,
        )
        for name, path in (("hub", found.path), ("other", Path("/nowhere")))
    )
    site.serving.exchange(first)
    await until(lambda: site.serving.versions.before is None)
    request = site.serving.version.enter()
    async with live(site) as port:
        client = ollama.AsyncClient(host=f"http://127.0.0.1:{port}")
        with pytest.raises(ollama.ResponseError, match="in use"):
            await client.delete(MODEL)
        site.serving.exchange(second)
        with pytest.raises(ollama.ResponseError, match="in use"):
            await client.delete(MODEL)
        assert present() == {MODEL}
        request.leave()
        await until(lambda: site.serving.versions.before is None)
        assert (await client.delete(MODEL)).status == "success"
    assert present() == set()
