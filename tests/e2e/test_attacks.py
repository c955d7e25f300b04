"""What an honest client notices of hostile ones, on a real server: the gaps of its stream, alone and beside them."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server import Server, gauge, serving
from tests.frontend.http.flooding import FLOODS
from tests.frontend.http.test_floods import flooding
from tests.often import often
from tests.patience import PATIENCE
from tests.text.test_hostile_grammars import HOSTILE, any_two, chained

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Write a long story about a river."}]
TOKENS = 400
LONGEST = 10.0  # seconds, of a gap beside an attack: the machine may be busy with other tests; it was 36 s
# The checker follows 512 bytes of a text, so that only the engine meets what comes after 520.
HIDDEN = {
    "hidden": any_two(6).replace("start: r0", "start: /[a-z]{520}/ r0"),
    "hidden chain": chained(240).replace("start: a", "start: /[a-z]{520}/ a"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-num-seqs", "64", "--kv-cache-memory", "128MiB", "--max-model-len", "1024", "--state-dir", "none")
    with serving(tmp_path_factory.mktemp("attacks") / "log", *flags) as running:
        yield running


def gaps(server: Server) -> list[float]:
    """The times between the events of a stream, sorted; the first is that until its first token."""
    body = {"messages": USER, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    found, last = [], time.monotonic()
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(time.monotonic() - last)
                last = time.monotonic()
    assert len(found) > 5  # a process that is busy sends several tokens in an event
    return sorted(found)


@pytest.fixture(scope="module")
def alone(server: Server) -> list[float]:
    return gaps(server)


def beside(attack: Callable[[], None], server: Server) -> list[float]:
    """The gaps of a stream while other threads attack without pause."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            attack()

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        return gaps(server)
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE)


def shown(name: str, alone: list[float], found: list[float]) -> None:
    p99 = [1e3 * each[-1 - len(each) // 100] for each in (alone, found)]
    print(f"{name}: P50 {1e3 * found[len(found) // 2]:.0f} ms, P99 {p99[1]:.0f} ms (alone {p99[0]:.0f} ms)")


@pytest.mark.parametrize("name", often([*HOSTILE, *HIDDEN], ["82 bytes", "50 KB", "pairs", "a chain", *HIDDEN]))
def test_grammars(server: Server, alone: list[float], name: str) -> None:
    """With many choices, and each time another text, as what was checked is remembered."""
    statuses, numbers = [], iter(range(10**6))

    def attack() -> None:
        grammar = (HIDDEN | HOSTILE)[name] + f"\n// {next(numbers)}\n"
        body = {"messages": USER, "guided_grammar": grammar, "n": 8 if name in HIDDEN else 32, "max_tokens": 250}
        statuses.append(httpx.post(server.url + CHAT, json=body, timeout=PATIENCE).status_code)

    found = beside(attack, server)
    shown(name, alone, found)
    assert found[-1] < LONGEST
    assert statuses and set(statuses) <= ({200, 400, 503} if name in HIDDEN else {400})
    assert gauge(server.get("/metrics").text, "penstock_engine_restarts_total") == 0


@pytest.mark.parametrize("kind", FLOODS)
def test_requests_that_are_given_up(server: Server, alone: list[float], kind: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(gaps, server)
        time.sleep(0.2)
        with flooding(kind, server.port):
            found = stream.result()
    shown(kind, alone, found)
    assert found[-1] < LONGEST
    assert gaps(server)[-1] < PATIENCE


def first_token(server: Server) -> float:
    """The seconds to the first token of a short stream."""
    body, began = {"prompt": "def add(a, b):", "max_tokens": 1, "stream": True}, time.monotonic()
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        next(line for line in answer.iter_lines() if line.startswith("data: {"))
    return time.monotonic() - began


def test_requests_of_many_prompts(server: Server) -> None:
    """Two clients send 40 long prompts each: the prompts of others come between these."""
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})

    def send(client: int) -> float:
        prompts, began = [f"# {client} {i}\n" + "x = y + 1\n" * 100 for i in range(40)], time.monotonic()
        body = {"prompt": prompts, "max_tokens": 4}
        assert httpx.post(server.url + COMPLETIONS, json=body, timeout=PATIENCE).status_code == 200
        return time.monotonic() - began

    quiet = max(first_token(server) for _ in range(5))
    found = []
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(send, client) for client in range(2)]
        time.sleep(0.5)
        while not any(each.done() for each in sent):
            found.append(first_token(server))
            time.sleep(0.1)
        took = min(each.result() for each in sent)
    print(f"first tokens: {1e3 * quiet:.0f} ms alone, up to {1e3 * max(found):.0f} ms beside requests of {took:.1f} s")
    assert max(found) < took / 3
