"""The gRPC server beside the HTTP server, on a port of its own."""

from typing import Any

import grpc
import grpc.aio

from penstock.frontend.http.access import Access
from penstock.frontend.http.tls import TLS
from penstock.frontend.kserve.grpc.calls import Calls
from penstock.frontend.kserve.grpc.service import handlers

_ENVELOPE_BYTES = 4 << 10  # of a message around its texts
_MIN_PING_SECONDS = 10  # between the pings of a client that keeps its connection alive


class GRPCServer:
    """Answers KServe's gRPC service through the app, which has the limits, the keys and the logs."""

    def __init__(self, app: Access, host: str, port: int, tls: TLS | None = None, *, shares_port: bool = False) -> None:
        """With `shares_port`, other processes may listen on it, too."""
        self._app = app
        self.address = f"{host}:{port}"
        self._tls = tls
        self._shares_port = shares_port
        self._server: Any = None

    async def start(self) -> None:
        """Begins to answer. Raises OSError if the address cannot be used."""
        limits = self._app.limits
        options = [
            ("grpc.so_reuseport", int(self._shares_port)),
            ("grpc.max_receive_message_length", limits.max_body_bytes + _ENVELOPE_BYTES),
            ("grpc.max_send_message_length", limits.max_answer_bytes + _ENVELOPE_BYTES),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.keepalive_time_ms", int(limits.ping_interval * 1000)),
            ("grpc.keepalive_timeout_ms", int(limits.ping_interval * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_SECONDS * 1000),
        ]
        calls = Calls(self._app, tls=self._tls is not None)
        most = limits.max_in_flight + limits.max_sockets  # streams and watches besides requests
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        self._server.add_generic_rpc_handlers(handlers(calls, limits.max_socket_requests))
        try:
            if self._tls is None:
                self._server.add_insecure_port(self.address)
            else:
                self._server.add_secure_port(self.address, _credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.address} for gRPC; choose another --grpc-port") from error
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Refuses new calls, and ends those that are left after `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)


def _credentials(tls: TLS) -> Any:
    """Credentials that follow the certificate when it is renewed."""

    def current() -> Any:
        chain, key = tls.pems
        return grpc.ssl_server_certificate_configuration([(key, chain)])

    return grpc.dynamic_ssl_server_credentials(current(), current)
