"""A reload under load, of a real server: no request fails, and every answer is of one version from end to end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.weights.packaged import embedded_model
from tests.e2e.server import Server, gauge, serving
from tests.engine.processes import children, command_line
from tests.patience import PATIENCE, wait_for

# Without speculation: drafts from the same answers before would end the streams before all of them run at once.
FLAGS = ("--seed", "7", "--speculation", "off")
STREAMS = 24
PROMPTS = [f"Chapter {i}. " + "The river rose again that night, and" for i in range(STREAMS)]


class Settings:
    """The file that a server was started with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, model: str, **others: object) -> None:
        common = {"served-model-name": "ours", "max-num-seqs": 32, "kv-cache-memory": "192MiB"}
        lines = {"model": model, **common, **others}
        self.path.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))


class Site:
    """A server, its settings, and two models."""

    def __init__(self, server: Server, settings: Settings, first: str, second: str, long: int) -> None:
        self.server, self.settings, self.first, self.second = server, settings, first, second
        self.long = long  # tokens of a stream that outlasts a reload
        self.served = first

    @property
    def other(self) -> str:
        """The model that is not served."""
        return self.second if self.served == self.first else self.first

    @property
    def engines(self) -> list[int]:
        others = self.api_processes
        return [pid for pid in children(self.server.process.pid) if pid not in others]

    @property
    def api_processes(self) -> list[int]:
        """Of a server that has several."""
        return [pid for pid in children(self.server.process.pid) if "api_process" in command_line(pid)]


def another_version(folder: Path) -> Path:
    """The model with other weights: half of a matrix is zero."""
    copy = folder / "another"
    shutil.copytree(embedded_model(), copy)
    with (copy / "model.safetensors").open("r+b") as weights:
        weights.seek(-100_000, os.SEEK_END)
        weights.write(bytes(50_000))
    return copy


@pytest.fixture(
    scope="module",
    params=[
        ("python-8m", "", 400, 1),
        ("python-8m", "", 400, 3),
        pytest.param(("smollm2-135m", "python-8m", 250, 1), marks=pytest.mark.rare),
    ],
    ids=["python-8m", "three-processes", "smollm2"],
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("reload")
    settings = Settings(folder / "settings.yaml")
    first, second, long, processes = request.param
    second = second or str(another_version(folder))
    settings.write(first)
    flags = (*FLAGS, "--config", str(settings.path), "--api-processes", str(processes))
    with serving(folder / "log", *flags, model=None) as server:
        yield Site(server, settings, first, second, long)


def run(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    """`penstock reload`, `sleep` or `wake`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    line = [sys.executable, "-m", "penstock", words[0], server.url, *words[1:]]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def command(server: Server, *words: str, status: int = 0) -> str:
    """What `penstock reload`, `sleep` or `wake` prints."""
    done = run(server, *words)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr.splitlines()[-1]


def fingerprint(server: Server) -> str:
    return str(server.get("/v1/models").json()["data"][0]["fingerprint"])


class Answer:
    """A completion: its text and the versions that its events name."""

    def __init__(self, server: Server, prompt: str, max_tokens: int, begun: Callable[[], None] = lambda: None) -> None:
        """Calls `begun` when the stream has."""
        body = {"model": "ours", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0.8}
        self.text, self.versions = "", set[str]()
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE) as answer:
            assert answer.status_code == 200, answer.read()
            lines = []
            for line in answer.iter_lines():
                if not line or line.startswith(":"):  # a comment: nothing has been computed yet
                    continue
                if not lines:
                    begun()
                lines.append(line)
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            event = json.loads(line[6:])
            assert "error" not in event, event
            self.versions.add(event["system_fingerprint"])
            self.text += event["choices"][0]["text"]

    @property
    def version(self) -> str:
        (only,) = self.versions
        return only


def every(server: Server, max_tokens: int) -> list[str]:
    """The answers of an undisturbed server to each prompt, not streamed."""
    body = {"model": "ours", "prompt": PROMPTS, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


class Load:
    """Open streams, and short requests one after another, from before a reload until after it."""

    def __init__(self, server: Server, long: int, short: int, streams: int = STREAMS) -> None:
        """Begins when so many `streams` have begun."""
        self.long: list[Answer | None] = [None] * STREAMS
        self.short: list[tuple[int, Answer]] = []
        self.failures: list[str] = []
        self._server, self._sizes, self._streams, self._stop = server, (long, short), streams, threading.Event()
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._stream, args=(i,)) for i in range(STREAMS)]
        self._threads += [threading.Thread(target=self._ask, args=(start,)) for start in (0, 7)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        if all(self._begun.acquire(timeout=PATIENCE) for _ in range(self._streams)):
            return self
        self.__exit__()
        raise AssertionError(f"not all streams began: {self.failures}")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _stream(self, i: int) -> None:
        try:
            self.long[i] = Answer(self._server, PROMPTS[i], self._sizes[0], self._begun.release)
        except Exception as error:
            self.failures.append(repr(error))

    def _ask(self, start: int) -> None:
        for i in (n % STREAMS for n in range(start, 10**6)):
            if self._stop.is_set():
                return
            try:
                self.short.append((i, Answer(self._server, PROMPTS[i], self._sizes[1])))
            except Exception as error:
                self.failures.append(repr(error))


def assert_waits_for_the_version_before(server: Server, load: Load) -> None:
    """That a second reload is refused while streams go on; on a busy machine they have ended when it is asked."""
    done = run(server, "reload")
    if done.returncode == 0:
        assert all(load.long) and "nothing has changed" in done.stdout
    else:
        assert "the version before the last reload still answers" in done.stderr


def test_streams_end_on_the_version_they_began_with(site: Site) -> None:
    server, short = site.server, 12
    first, undisturbed = fingerprint(server), every(server, site.long)
    steps = gauge(server.get("/metrics").text, "penstock_engine_steps_total")
    site.settings.write(site.other)
    with Load(server, site.long, short) as load:
        said = command(server, "reload")
        second = fingerprint(server)
        assert said.startswith(f"ours {second} serves after ") and second != first
        assert_waits_for_the_version_before(server, load)
        wait_for(lambda: sum(answer.version == second for _, answer in load.short) >= 8, "answers of the new model")
    site.served = site.other
    assert load.failures == []
    assert [answer and answer.text for answer in load.long] == undisturbed
    assert {answer and answer.version for answer in load.long} == {first}
    assert {answer.version for _, answer in load.short} == {first, second}
    wait_for(lambda: len(site.engines) == 1, "the old engine to end")
    whole = {first: undisturbed, second: every(server, short)}
    for i, answer in load.short:
        assert answer.text and whole[answer.version][i].startswith(answer.text), (i, answer.version)
    metrics = server.get("/metrics").text
    assert gauge(metrics, "penstock_engine_steps_total") > steps
    assert gauge(metrics, 'penstock_reloads_total{result="done"}') >= 1
    assert f'penstock_model_info{{fingerprint="{second}",model_name="ours"}} 1.0' in metrics


def test_sighup_takes_new_flags_and_does_nothing_without_any(site: Site) -> None:
    server = site.server
    version, engines, reloads = fingerprint(server), site.engines, server.log.read_text().count("reloaded in")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: f"SIGHUP: nothing has changed: ours {version} goes on" in server.log.read_text(), "the line")
    assert site.engines == engines
    site.settings.write(site.served, **{"max-model-len": 300})
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: server.get("/v1/models").json()["data"][0]["max_model_len"] == 300, "the new flag")
    assert fingerprint(server) == version  # the answers are the same
    assert server.log.read_text().count("reloaded in") == reloads + 1
    wait_for(lambda: len(site.engines) == 1, "the old engine to end")


@pytest.mark.rare
def test_new_requests_wait_if_the_old_engine_ends_first(site: Site) -> None:
    server = site.server
    version = fingerprint(server)
    site.settings.write(site.other)
    most = 0
    with Load(server, 250, 12, streams=2) as load:
        thread = threading.Thread(target=command, args=(server, "reload", "--drain-first"))
        thread.start()
        while thread.is_alive():
            most = max(most, len(site.engines))
            thread.join(0.01)
    site.served = site.other
    assert load.failures == [] and most == 1
    assert {answer and answer.version for answer in load.long} == {version}
    assert load.short[-1][1].version == fingerprint(server) != version


def test_a_reload_that_cannot_be_changes_nothing(site: Site, tmp_path: Path) -> None:
    server, version, engines = site.server, fingerprint(site.server), site.engines
    broken = tmp_path / "broken"
    shutil.copytree(embedded_model(), broken)
    (broken / "tokenizer.json").write_text("{}")
    for model, flags, words in (
        (
            site.first,
            {"max-prompts": 3},
            f"--max-prompts ({site.settings.path}, line 5) has changed",
        ),
        (site.other, {"max-prompt": 3}, "did you mean"),
        (site.other, {"kv-cache-memory": "900TiB"}, "or use --drain-first"),
        (str(broken), {}, "tokenizer.json"),
    ):
        site.settings.write(model, **flags)
        said = command(server, "reload", status=1)
        assert "the old version goes on" in said and words in said
    assert fingerprint(server) == version and site.engines == engines
    assert Answer(server, PROMPTS[0], 4).version == version


def test_all_processes_stay_on_the_old_version_if_one_ends(site: Site) -> None:
    if not site.api_processes:
        pytest.skip("the server has one API process")
    server, version, processes, engines = site.server, fingerprint(site.server), site.api_processes, site.engines
    site.settings.write(site.other)
    before = len(server.log.read_text())
    os.kill(processes[-1], signal.SIGSTOP)  # so the others load the new version, and this one does not
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "API processes load the version" in server.log.read_text()[before:], "the offer")
    os.kill(processes[-1], signal.SIGKILL)
    line = "SIGHUP: nothing was reloaded, and the old version goes on: API process 2 has ended; reload again"
    wait_for(lambda: line in server.log.read_text(), "the line")
    wait_for(lambda: len(site.api_processes) == len(processes), "another process")
    wait_for(lambda: site.engines == engines, "the second engine to end")
    assert {fingerprint(server) for _ in range(20)} == {version}
    assert {Answer(server, prompt, 4).version for prompt in PROMPTS} == {version}
    assert " serves after " in command(server, "reload")  # now it can
    site.served = site.other
    assert len({fingerprint(server) for _ in range(20)} - {version}) == 1
    wait_for(lambda: len(site.engines) == 1, "the old engine to end")


def test_sleep_gives_the_memory_back_and_a_request_wakes(site: Site) -> None:
    server = site.server
    before, memory = Answer(server, PROMPTS[0], 8).text, resident(site)
    assert "asleep" in command(server, "sleep")
    assert site.engines == [] and server.get("/is_sleeping").json() == {"is_sleeping": True}
    asleep = resident(site)
    assert memory - asleep > 150 << 20  # torch alone takes more
    assert server.get("/readyz").json() == {"status": "asleep"} and server.get("/livez").status_code == 200
    metrics = server.get("/metrics").text
    assert gauge(metrics, "penstock_engine_asleep") == gauge(metrics, "penstock_engine_healthy") == 1
    assert "penstock_engine_resident_memory_bytes{" not in metrics
    late = {"prompt": "x", "max_tokens": 4, "timeout": 0.05}
    assert server.post("/v1/completions", late).status_code == 504  # the engine cannot be there by then
    assert Answer(server, PROMPTS[0], 8).text == before
    assert gauge(server.get("/metrics").text, "penstock_engine_asleep") == 0
    command(server, "sleep")
    assert command(server, "wake") == "awake\n"
    assert len(site.engines) == 1 and abs(resident(site) - memory) < memory / 4
    print(f"resident: {memory >> 20} MiB, asleep {asleep >> 20}, awake {resident(site) >> 20}")


def resident(site: Site) -> int:
    """Bytes of the server and its engine."""
    found = 0
    for pid in (site.server.process.pid, *site.engines, *site.api_processes):
        found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found
