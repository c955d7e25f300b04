"""The engine's end of the socket to a client in another process."""

import math
import os
import time

import zmq

from penstock.engine.merge import StepBuffer
from penstock.engine.port import COMMANDS_AT_ONCE
from penstock.engine.wire import Command, Event, Failed, Hello, Ready, Rejected, Step, Stop, decode_command, encode

EVENTS_IN_FLIGHT = 64  # messages that may wait in the socket; beyond, they are merged
LINGER_MS = 1000  # for the last word to get through


class SocketPort:
    """The engine's end of the socket.

    A client that does not read cannot stall the engine: what its socket does not take is merged, one delta for each
    choice, and sent when there is room.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = LINGER_MS
        self._socket.sndhwm = EVENTS_IN_FLIGHT
        self._socket.rcvhwm = 0  # bounded by the client's admission
        self._socket.connect(endpoint)
        self._late = StepBuffer()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop: Stop | None = None

    def receive(self, *, wait: float) -> list[Command | Rejected]:
        if wait:
            self._sleep(wait)
        self._send_late()
        commands: list[Command | Rejected] = [] if self._stop is None else [self._stop]
        while len(commands) < COMMANDS_AT_ONCE:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if (command := decode_command(frame)) is not None:
                commands.append(command)
        return commands

    def post(self, step: Step) -> None:
        if self._late or not self._send(step):
            self._late.push(step)

    def announce(self, event: Hello | Ready | Failed) -> None:
        """Waits a moment for a client that is behind; without it, the end of this process has to say enough."""
        self._send_late(LINGER_MS)
        if not self._late and self._socket.poll(LINGER_MS, zmq.POLLOUT):
            self._send(event)

    def stop(self, reason: str) -> None:
        """Let the next `receive` return a Stop. May be called from a signal handler."""
        self._stop = Stop(reason)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Wait a moment for the last messages to leave."""
        self._socket.close()
        self._context.term()
        os.close(self._wake)

    def _sleep(self, seconds: float) -> None:
        """Until there is a command, or the time is over. Meanwhile late messages leave as soon as there is room."""
        end = time.monotonic() + seconds
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        while (left := end - time.monotonic()) > 0:
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._late else 0))
            ready = dict(poller.poll(math.ceil(left * 1000)))
            if ready.get(self._wake) or ready.get(self._socket, 0) & zmq.POLLIN:
                return
            self._send_late()

    def _send_late(self, patience_ms: int = 0) -> None:
        if self._late and self._socket.poll(patience_ms, zmq.POLLOUT):
            step = self._late.take()
            if not self._send(step):
                self._late.push(step)

    def _send(self, event: Event) -> bool:
        try:
            self._socket.send(encode(event), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
