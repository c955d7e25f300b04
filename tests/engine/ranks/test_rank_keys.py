"""Who may be a rank of an engine over TCP, and which engine a rank obeys."""

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from penstock.engine.ranks.keys import EngineKeys, RankKeys
from penstock.engine.ranks.rank_socket import RankSocket
from penstock.engine.ranks.wire import Hello, encode, identity
from penstock.engine.ranks.worker import connect

HELLO = Hello(1, 2, 3)
ADDRESS = "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


class Engine:
    """A socket with keys, for two ranks."""

    def __init__(self) -> None:
        self.keys = EngineKeys(2)
        self.socket = RankSocket(2, ADDRESS, self.keys)

    def heard(self, seconds: float) -> list[tuple[int, object]]:
        """What has come within so long, or until something has."""
        for _ in range(round(seconds / 0.05)):
            if reports := self.socket.receive(0.05):
                return list(reports)
        return []


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.socket.close()


def say_hello(context: "zmq.Context[zmq.Socket[bytes]]", engine: Engine, keys: RankKeys | None) -> "zmq.Socket[bytes]":
    rank = connect(context, engine.socket.endpoint, keys, name=identity(1))
    rank.send(encode(HELLO))
    return rank


def test_a_rank_with_its_keys_is_let_in_and_gets_its_orders(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    engine = Engine()
    with say_hello(context, engine, engine.keys.ranks[1]) as rank:
        assert engine.heard(5) == [(1, HELLO)]
        engine.socket.send(1, b"an order")
        assert rank.poll(5000)
        assert rank.recv() == b"an order"
    engine.socket.close()


@pytest.mark.parametrize("stranger", ["no keys", "keys of its own", "another engine's rank"])
def test_a_stranger_is_not_let_in(engine: Engine, context: "zmq.Context[zmq.Socket[bytes]]", stranger: str) -> None:
    own = EngineKeys(1).ranks[0]
    keys = {
        "no keys": None,
        "keys of its own": msgspec.structs.replace(own, engine=engine.keys.ranks[0].engine),
        "another engine's rank": own,
    }[stranger]
    with say_hello(context, engine, keys):
        assert engine.heard(0.5) == []
        with say_hello(context, engine, engine.keys.ranks[0]):  # which comes later
            assert engine.heard(5) == [(1, HELLO)]
        assert engine.heard(0.2) == []


def test_a_rank_does_not_talk_to_an_engine_it_does_not_know(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    engine = Engine()
    impostor = EngineKeys(1)
    impostor.allowed.update(engine.keys.allowed)  # it would let anybody in
    pretending = RankSocket(1, ADDRESS, impostor)
    with connect(context, pretending.endpoint, engine.keys.ranks[0], name=identity(0)) as rank:
        rank.send(encode(HELLO))
        assert pretending.receive(0.3) == pretending.receive(0.3) == []
    pretending.close()
    engine.socket.close()


def test_keys_do_not_show_in_a_representation() -> None:
    keys = EngineKeys(1).ranks[0]
    assert keys.secret not in repr(keys)
