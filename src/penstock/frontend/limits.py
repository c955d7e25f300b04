"""Limits of requests and connections, checked before anything is allocated for a request."""

import msgspec

from penstock.config import ServerConfig
from penstock.config.server import ServerLimits


class RequestLimits(ServerLimits, frozen=True, kw_only=True):
    """Limits of requests and connections: those of the settings, and others. Sizes are in bytes, times in seconds."""

    max_buffered_bytes: int = 256 << 20  # of all bodies that are being received or decoded
    max_json_strings: int = 16_384  # in a body, keys included
    max_json_containers: int = 8_192  # arrays and objects
    max_json_values: int = 150_000  # elements and members
    max_json_depth: int = 64
    max_header_bytes: int = 64 << 10  # of the target and all headers
    max_headers: int = 128
    max_pipelined: int = 16  # requests that wait on a connection for earlier answers
    max_inputs: int = 2048  # texts in one request for embeddings, scores or labels
    max_unread_bytes: int = 256 << 20  # of all answers that are being made or unread, after 64 KiB of each
    max_stop_chars: int = 256  # in one stop string
    max_logit_bias: int = 1024  # entries
    max_tools: int = 128  # in one request
    max_tool_bytes: int = 256 << 10  # of all tools of a request, as JSON
    max_tool_calls: int = 128  # in one message
    max_argument_chars: int = 1 << 20  # in the arguments of one tool call
    max_parameter_chars: int = 16_384  # in KServe's tensor sampling_parameters, which is JSON in a string
    max_response_chain: int = 1024  # responses that each continue the one before
    max_file_bytes: int = 256 << 20  # of an uploaded file
    max_stored_bytes: int = 8 << 30  # of all stored responses, files and batches
    max_batch_requests: int = 100_000
    max_batch_line_bytes: int = 4 << 20
    max_batches: int = 64  # of one owner that are not complete
    storage_seconds: float = 30 * 86_400.0  # until a response or a file expires
    max_id_chars: int = 256  # in a request's id that each part of its answer repeats
    max_sockets: int = 256  # WebSockets that are open
    max_socket_requests: int = 64  # in flight on one WebSocket
    ping_interval: float = 20.0  # between the pings of a WebSocket; a client that does not answer for as long is gone
    header_timeout: float = 15.0  # from the first byte of a request to the end of its headers
    body_timeout: float = 60.0  # from the end of the headers to the end of the body
    min_upload_rate: int = 256 << 10  # bytes/s: a file that is uploaded has body_timeout and its size / this rate
    write_timeout: float = 120.0  # a client that does not read for this long is disconnected
    keep_alive_timeout: float = 75.0
    retry_after: int = 1  # seconds; the Retry-After header where nothing better is known

    def share(self, processes: int) -> "RequestLimits":
        """The limits of one of several processes: its part of what is counted in a process."""
        return msgspec.structs.replace(
            self,
            max_buffered_bytes=-(-self.max_buffered_bytes // processes),
            max_unread_bytes=-(-self.max_unread_bytes // processes),
            max_in_flight=-(-self.max_in_flight // processes),
            max_sockets=-(-self.max_sockets // processes),
        )

    @classmethod
    def of(cls, config: ServerConfig) -> "RequestLimits":
        """The limits that the server's settings contain; the others have their defaults."""
        return cls(**{name: getattr(config, name) for name in ServerLimits.__struct_fields__})
