"""What engines of a repository get: at the start, and when one of them is loaded again."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from penstock.cli.operate.reload import LoadedVersion, Reloader
from penstock.cli.serving.repository import LanguageModelLoader
from penstock.cli.serving.shares import EngineShares
from penstock.config import ConfigError, detect_hardware, resolve_server
from penstock.engine.client import StreamingClient
from penstock.frontend.registry import ModelRegistry
from penstock.kernels.native.loader import instruction_sets
from penstock.messages import Identity
from penstock.observe.metrics import Metrics
from penstock.prepare.model import PreparedModel, find_given, read_given
from penstock.repository.entry import Target
from penstock.repository.settings import ModelSettings

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="engines without native kernels have fixed shares")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.yaml").write_text("model: python-8m\n")
    return tmp_path


@pytest.mark.parametrize("beside", [True, False])
def test_a_model_that_is_loaded_again_has_the_same_share(repository: Path, beside: bool) -> None:
    shares, hardware = EngineShares(repository, None, beside=True), replace(detect_hardware(), memory_available=3 << 30)
    given = read_given("python-8m", {"max_num_seqs": 4})
    first = shares.prepare(find_given(given), hardware)
    engine = first.resolved.engine
    assert shares.at_once == 3 and engine.kv_cache_bytes is not None
    assert engine.kv_reserve_bytes == 3 * engine.kv_cache_bytes

    changed = {"max_num_seqs": 5}
    reloader = Reloader("python-8m", changed, LoadedVersion.of(first, given), shares.processors, shares)
    asleep = SimpleNamespace(state=SimpleNamespace(status="asleep"))
    again = reloader._read(asleep, beside)  # type: ignore[arg-type]
    assert again is not None
    engine = again.prepared.resolved.engine
    assert engine.max_num_seqs == 5 and engine.kv_reserve_bytes == 3 * (engine.kv_cache_bytes or 0) > 0
    assert engine.replaces is beside
    assert (engine.kv_cache_bytes or 0) < 1 << 30  # a third of the memory at the start


def test_a_size_in_the_settings_stays(repository: Path) -> None:
    shares = EngineShares(repository, 1)
    engine = shares.prepare(find_given(read_given("python-8m", {"kv_cache_memory": "32MiB"})), detect_hardware())
    assert engine.resolved.engine.kv_cache_bytes == 32 << 20 and engine.resolved.engine.kv_reserve_bytes is None


@pytest.mark.parametrize(("name", "value"), [("kv_disk", "/tmp/kv,1GiB"), ("event_log", "/tmp/log")])
def test_what_one_engine_has_is_refused_for_all(repository: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* is for one engine"):
        resolve_server(read_given(None, {"repository": str(repository), name: value}))


class ClientOfNone:
    def __init__(self, info: object) -> None:
        self.info = info


class NoEngine(EngineShares):
    """Starts no engine. Notes whether each one replaces another."""

    def __init__(self, repository: Path) -> None:
        super().__init__(repository, None)
        self.replaces = list[bool]()

    async def start_engine(self, prepared: PreparedModel, *_: object) -> StreamingClient:
        self.replaces.append(prepared.resolved.engine.replaces)
        info = SimpleNamespace(identity=Identity("tests"), vocab_size=300, eos_token_ids=(), max_model_len=64)
        return cast(StreamingClient, ClientOfNone(info))


@pytest.mark.parametrize(
    ("before", "candidate", "replaces"),
    [(None, False, False), ("asleep", False, False), ("ready", False, True), ("asleep", True, True)],
)
def test_an_engine_that_no_request_waits_for_replaces_another_one(
    repository: Path, before: str | None, candidate: bool, replaces: bool
) -> None:
    """`before`: the state of the engine that the model has."""
    server = resolve_server(read_given(None, {"repository": str(repository)}))
    shares = NoEngine(repository)
    loader = LanguageModelLoader({}, Metrics(CollectorRegistry()), server, shares)
    loader.registry = cast(ModelRegistry, SimpleNamespace(all=[]))
    loader.is_candidate = lambda target: candidate
    target = Target("first", 1, "", 0, repository / "first", ModelSettings(model="python-8m"))
    first = asyncio.run(loader._start(target))
    if before is not None:
        served = SimpleNamespace(model=first, has_engine=before == "ready")
        loader.registry = cast(ModelRegistry, SimpleNamespace(all=[served]))
    again = asyncio.run(loader._start(target))
    assert shares.replaces == [candidate, replaces]
    assert (again.tokenizer is first.tokenizer) is (before is not None)  # to make another one holds Python's lock
