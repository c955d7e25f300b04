"""Pages between two engines over a connection on loopback."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.config.engine import PageAccess
from penstock.engine.link.wire import Abort
from penstock.engine.remote.tcp import BEAT_SECONDS, SILENCE_SECONDS
from penstock.engine.tier import peers
from penstock.engine.tier.files import page_header
from penstock.engine.tier.peers import PageServer, PeerPages
from penstock.messages import PagesAt
from tests.e2e.certificates import Authority
from tests.engine.tier.engine import TierEngine
from tests.patience import wait_for

LONG = 44  # tokens: eleven blocks
FINGERPRINT = "weights and numerics"


class Pair:
    """An engine that has a text, and one that reads its blocks from there."""

    def __init__(self, folder: Path, access: PageAccess, reader: PageAccess, fingerprint: str = FINGERPRINT) -> None:
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        self.owner, self.reader = TierEngine(folder / "a"), TierEngine(folder / "b")
        self.owner.ask(1, LONG)
        self.owner.settle()
        self.server = PageServer(access, FINGERPRINT, self.owner.lender, self.owner.results, lambda: None)
        self.address = f"127.0.0.1:{self.server.port}"
        self.reader.peer = lambda where: PeerPages(
            where, reader, fingerprint, self.reader.results, self.reader.tiers.count
        )

    def step(self) -> None:
        """A step of both, without time passing."""
        self.owner.core.step()
        self.reader.core.step()

    def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.step()
            return condition()

        wait_for(look, "the blocks")

    def answered(self, request: str = "") -> str:
        """Let the reader answer a request for the text. Returns its id."""
        name = self.reader.ask(1, LONG, pages=PagesAt(self.address, request))
        self.until(lambda: bool(self.reader.answers[name][1].ends))
        self.until(lambda: not self.reader.reader.busy and not self.owner.lender.busy)
        self.owner.settle()
        self.reader.settle()
        self.owner.check()
        self.reader.check()
        return name


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    access = PageAccess(key="secret")
    made = Pair(tmp_path, access, access)
    yield made
    made.server.close()


def test_blocks_come_from_another_engine(pair: Pair) -> None:
    name = pair.answered()
    assert pair.reader.cached(name) == LONG - 1
    assert pair.reader.tiers.counts()["peer_reads"] == pair.owner.tiers.counts()["peer_sends"] == LONG // 4


def test_blocks_come_while_they_are_computed(pair: Pair) -> None:
    """The reader connects before the other engine has the prompt."""
    name = pair.reader.ask(2, LONG, pages=PagesAt(pair.address, f"r{pair.owner.count + 1}"))
    pair.until(lambda: pair.owner.lender.busy)
    pair.owner.ask(2, LONG)
    pair.until(lambda: bool(pair.reader.answers[name][1].ends))
    assert pair.reader.cached(name) == LONG - 1


def test_what_the_other_engine_does_not_have_is_computed(pair: Pair) -> None:
    name = pair.reader.ask(3, LONG, pages=PagesAt(pair.address, ""))
    pair.until(lambda: bool(pair.reader.answers[name][1].ends))
    assert pair.reader.cached(name) == 0 and pair.reader.tiers.counts()["peer_failures"] == 1
    assert not pair.owner.scheduler.leases.held


def test_a_damaged_page_is_computed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def header(key: bytes, page: memoryview) -> bytes:
        nonlocal sent
        sent += 1
        return page_header(key, page) if sent < 4 else page_header(key, memoryview(bytes(len(page))))

    monkeypatch.setattr(peers, "page_header", header)
    name = pair.answered()
    assert pair.reader.cached(name) == 12
    assert pair.reader.tiers.counts()["peer_failures"] == 1


def test_a_client_that_leaves_frees_the_blocks_of_both(pair: Pair) -> None:
    name = pair.reader.ask(2, LONG, pages=PagesAt(pair.address, f"r{pair.owner.count + 1}"))
    pair.until(lambda: pair.owner.lender.busy)
    del pair.reader.answers[name]
    pair.reader.step(Abort(name))
    pair.until(lambda: not pair.owner.lender.busy and not pair.reader.reader.busy)
    pair.reader.check()
    pair.owner.check()


def test_an_engine_that_stops_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the connection, and nothing comes."""
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair.address = f"127.0.0.1:{silent.getsockname()[1]}"
        name = pair.answered()
    assert pair.reader.cached(name) == 0


@pytest.mark.parametrize("wrong", [{"key": "other"}, {"fingerprint": "other numerics"}])
def test_only_engines_of_the_fleet_get_blocks(tmp_path: Path, wrong: dict[str, str]) -> None:
    access = PageAccess(key="secret")
    reader = replace(access, key=wrong.get("key", "secret"))
    pair = Pair(tmp_path, access, reader, wrong.get("fingerprint", FINGERPRINT))
    assert pair.reader.cached(pair.answered()) == 0
    assert pair.owner.tiers.counts()["peer_sends"] == 0
    pair.server.close()


def test_tls(tmp_path: Path) -> None:
    authority, file = Authority(tmp_path), tmp_path / "engine.pem"
    file.write_bytes(b"".join(authority.sign(1)))
    access = PageAccess(key="secret", certificate=str(file), authority=str(authority.file))
    pair = Pair(tmp_path, access, access)
    assert pair.reader.cached(pair.answered()) == LONG - 1
    pair.server.close()


def test_no_thread_is_left(pair: Pair) -> None:
    pair.answered()
    pair.server.close()
    wait_for(lambda: not any(one.name.startswith("kv-peer") for one in threading.enumerate()), "threads to end")


class Beats:
    """A connection whose other end sends a byte after so many looks, each of which may last as long as it likes."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def gettimeout(self) -> float:
        return BEAT_SECONDS

    def recv_into(self, target: memoryview) -> int:
        if self.looks:
            self.looks -= 1
            raise TimeoutError
        target[:1] = b"x"
        return 1


def test_silence_is_counted_in_looks_so_that_a_stop_of_this_process_is_none() -> None:
    enough = round(SILENCE_SECONDS / BEAT_SECONDS)
    page = bytearray(1)
    peers._read_into(Beats(enough - 1), memoryview(page))
    assert page == b"x"
    with pytest.raises(TimeoutError):
        peers._read_into(Beats(enough), memoryview(page))
