"""Every flag and argument of every command is used once as a newcomer would use it, and does something."""

import json
import os
import shlex
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.cli.options import ENGINE as ENGINE_FLAGS
from penstock.cli.options import SERVER as SERVER_FLAGS
from penstock.cli.tenants.keys import add
from penstock.simulate.prices import BOOK
from tests.cli.conftest import RunCommand
from tests.cli.test_wrong_use import COMMANDS, label
from tests.cli.uses.right_uses import (
    ELSEWHERE,
    ENGINE_HOST,
    ENGINES,
    FAILING,
    FRONT,
    GPU_ONLY,
    HUB_MODEL,
    KEYS,
    LINES,
    MODELS,
    OF_FLEET,
    OF_RANKS,
    OF_REPOSITORY,
    OF_TENANTS,
    OTHERS,
    PLANS,
    REPLICATED_SERVER,
    REPOSITORY_SERVER,
    ROUTES,
    SERVERS,
    SHARED_SERVER,
    SIMULATIONS,
    WITH_SERVER,
)
from tests.e2e.certificates import Authority
from tests.e2e.fleet.engines import EngineHostProcess
from tests.e2e.server import Server, serving, status
from tests.patience import wait_for
from tests.ports import free_port
from tests.repository.onnx_files import put, scale
from tests.weights.standin_hub import serving as hub_serving

VARIANT = "mixtral_window"  # its experts can be divided between two ranks
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def command_and_words(line: str) -> tuple[str, list[str]]:
    words = line.split()
    length = next(length for length in (2, 1) if " ".join(words[:length]) in COMMANDS)
    return " ".join(words[:length]), words[length:]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_flag_and_argument_has_a_right_use(path: str) -> None:
    """A new one needs a line in right_uses.py."""
    used = [words for command, words in map(command_and_words, LINES) if command == path]
    flags = {word for words in used for word in words if word.startswith("--")}
    params = [param for param in COMMANDS[path].params if param.name != "help"]
    wanted = {flag for param in params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")}
    assert flags <= wanted
    assert wanted - flags - ELSEWHERE.get(path, GPU_ONLY | OF_RANKS) == set(), path
    switches = {
        flag for param in params if getattr(param, "is_flag", False) for flag in (*param.opts, *param.secondary_opts)
    }
    arguments = [param for param in params if param.param_type_name == "argument"]
    assert max(map(len, (positional(words, switches) for words in used))) >= len(arguments), [*map(label, arguments)]


def positional(words: list[str], switches: set[str]) -> list[str]:
    """The words that are neither flags nor their values."""
    found, rest = [], iter(words)
    for word in rest:
        if not word.startswith("--"):
            found.append(word)
        elif word not in switches:
            next(rest)
    return found


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "tiny").symlink_to(tiny_checkpoint(VARIANT))
    (folder / "settings.yaml").write_text("max-waiting: 32\n")
    (folder / "providers.yaml").write_text("providers: {ollama: {url: http://127.0.0.1:11434/v1, private: true}}\n")
    (folder / "marks.yaml").write_text("watermark-key: 0123456789abcdef0123456789abcdef\n")
    (folder / "requests.jsonl").write_text(
        '{"custom_id":"a","url":"/v1/completions","body":{"prompt":"a","max_tokens":4}}'
    )
    (folder / "text.txt").write_text(TEXT)
    labels = ({"request": {"prompt": str(number)}, "small": number % 2, "large": 1} for number in range(20))
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    certificate, key = Authority(folder).sign(1)
    (folder / "cert.pem").write_bytes(certificate)
    (folder / "keys").write_text("alice another\n")
    (folder / "key.pem").write_bytes(key)
    (folder / "prices.yaml").write_bytes(BOOK.read_bytes())
    (folder / "audit.key").write_text("a secret of the operator\n")
    add(str(folder / "tenants.yaml"), "search", "ci", None, (), (), admin=False)
    (folder / "repository" / "ours").mkdir(parents=True)
    (folder / "repository" / "ours" / "model.yaml").write_text(f"model: {folder / 'tiny'}\n")
    for version in (1, 2):
        put(folder / "repository", "ranks", scale(2), version, settings="versions: [1]")
    return folder


@pytest.mark.parametrize("line", PLANS)
def test_a_plan(run_command: RunCommand, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    if "--otlp" in line:
        pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed: make test has it")
    if "--quota-redis" in line:
        pytest.importorskip("redis", reason="the extra redis is not installed: make test has it")
    done = run_command(*shlex.split(line))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    settings = {**ENGINE_FLAGS, **SERVER_FLAGS}
    rows = [row for row in done.stdout.splitlines() if "command line" in row]
    for flag in filter(lambda word: word.startswith("--"), line.split()):
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if name in settings and name != "config":
            assert any(name in row for row in rows), (flag, done.stdout)


@pytest.fixture(scope="module")
def environment(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """With a hub that has the model, and a cache that is empty at first."""
    files = {path.name: path.read_bytes() for path in tiny_checkpoint(VARIANT).iterdir()}
    names = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with hub_serving(files, HUB_MODEL) as hub:
        home = str(tmp_path_factory.mktemp("home"))
        yield {**names, "HF_ENDPOINT": hub.url, "HF_HOME": home, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(line: str, folder: Path, environment: dict[str, str], status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *shlex.split(line)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, f"penstock {line}\n{done.stdout}"
    return done.stdout


@pytest.mark.rare
def test_the_commands_about_models(folder: Path, environment: dict[str, str]) -> None:
    said = {line: run(line, folder, environment) for line in MODELS}
    assert HUB_MODEL in said["list"] and HUB_MODEL in said["list --json"]
    assert json.loads(said["show tiny --json"])["vocabulary"] == 307
    assert HUB_MODEL not in run("list", folder, environment)


@pytest.mark.rare
def test_the_commands_with_an_engine(folder: Path, environment: dict[str, str]) -> None:
    for line in ENGINES:
        run(line, folder, environment)
    for line in FAILING:
        run(line, folder, environment, status=1)
    files = ("throughput.json", "latency.json", "q", "ids.json", "findings.json", "answers.jsonl")
    for file in (*files, "smaller.json", "against.json"):
        assert json.loads((folder / file).read_text()), file


@pytest.mark.rare
def test_simulations_and_keys(folder: Path, environment: dict[str, str]) -> None:
    for line in (*SIMULATIONS, *KEYS, *ROUTES):
        assert run(line, folder, environment)
    for file in ("batching.json", "fleet.json"):
        assert json.loads((folder / file).read_text()), file
    assert "uPlot" in (folder / "batching.html").read_text()


@pytest.mark.rare
def test_servers(folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    context = ssl.create_default_context(cafile=folder / "authority.pem")
    secured, ranked = SERVERS
    with serving(folder / "one.log", *flags(secured), model=HUB_MODEL, context=context) as server:
        assert listed(server, "Bearer secret") == ["ours", "also-ours"]
    assert json.loads((folder / "one.log").read_text().splitlines()[-1])
    load = "--served-model-name ours --api-key secret --admin-key operator --event-log events.jsonl"
    with serving(folder / "two.log", *flags(ranked), *load.split(), model="tiny") as server:
        for line in WITH_SERVER:
            run(line.format(url=server.url, log="events.jsonl"), folder, environment)
    assert json.loads((folder / "load.json").read_text())["failed"] == 0
    for line in OTHERS:
        assert run(line.format(log="events.jsonl"), folder, environment)
    assert json.loads((folder / "costs.json").read_text())


@pytest.mark.rare
def test_a_server_of_tenants(folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    key = run("tenants add tenants.yaml search --key new", folder, environment).split()[0]
    with serving(folder / "three.log", *flags(SHARED_SERVER), model="tiny") as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
    home = {**environment, "XDG_STATE_HOME": f"{folder / 'three.log'}-state"}
    ledger = folder / "three.log-state" / "penstock" / f"port-{server.port}"
    said = {
        line: run(line.format(port=server.port, ledger=ledger / "ledger.sqlite3"), folder, home) for line in OF_TENANTS
    }
    assert all("search" in said[line] for line in OF_TENANTS[:-2]), said
    assert "is intact" in said[OF_TENANTS[-1]]


@pytest.mark.rare
def test_a_server_of_a_repository(folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with serving(folder / "four.log", *flags(REPOSITORY_SERVER), model=None) as server:
        assert all(
            ("ranks" if line.startswith("rollout") else "ours") in run(line.format(url=server.url), folder, environment)
            for line in OF_REPOSITORY
        )


@pytest.mark.rare
def test_a_fleet(folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with serving(folder / "five.log", *flags(REPLICATED_SERVER), model="tiny") as server:
        assert server.get("/v1/models").json()["data"]
    command = [sys.executable, "-m", "penstock", *ENGINE_HOST.split()]
    with (folder / "engine.log").open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
    try:
        engine = EngineHostProcess(process, folder / "engine.log").address
        front, port = FRONT.format(engine=engine), free_port()
        with subprocess.Popen(
            [sys.executable, "-m", "penstock", *front.split(), "--port", str(port)], env=environment
        ) as server:
            try:
                wait_for(lambda: status(f"http://127.0.0.1:{port}/readyz") == 200, "the front to be ready")
            finally:
                server.terminate()
        said = [run(line.format(engine=engine), folder, environment) for line in OF_FLEET]
        assert "ours" in said[0] and "drains" in said[1]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def listed(server: Server, key: str) -> list[str]:
    answer = httpx.get(server.url + "/v1/models", headers={"Authorization": key}, verify=server.context or True)
    return [model["id"] for model in answer.json()["data"]]


def flags(line: str) -> list[str]:
    """The flags of a line of `penstock serve` without its port, which must be free, and its model."""
    words = line.split()[1:]
    for flag, count in (("--port", 2), ("--model", 2), (HUB_MODEL, 1), ("tiny", 1)):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + count]
    return words
