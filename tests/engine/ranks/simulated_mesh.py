"""Ranks that meet over sockets, as they do in a collective: who is not there holds up all others."""

import socket
import time

from penstock.config import RankPlace


class Mesh:
    """Rank 0 has a connection to each of the others, and they one to it."""

    def __init__(self, place: RankPlace, peers: list[socket.socket]) -> None:
        self.place = place
        self.peers = peers

    def meet(self) -> None:
        """Return when all ranks have come here. ConnectionError where one of them is gone."""
        if self.place.rank:
            self.peers[0].sendall(b".")
        for peer in self.peers:
            if not peer.recv(1):
                raise ConnectionError("the connection was closed by a peer")
        if not self.place.rank:
            for peer in self.peers:
                peer.sendall(b".")


def join(place: RankPlace, rendezvous: str) -> Mesh:
    host, port = rendezvous.rsplit(":", 1)
    if place.rank == 0:
        with socket.create_server((host, int(port))) as listener:
            return Mesh(place, [listener.accept()[0] for _ in range(place.split.world - 1)])
    for _ in range(3000):
        try:
            return Mesh(place, [socket.create_connection((host, int(port)))])
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise TimeoutError("rank 0 is not there")
