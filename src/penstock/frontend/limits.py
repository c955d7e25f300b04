"""What one client may ask for, checked before anything is allocated for it."""

import msgspec

from penstock.config import ServerConfig


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of requests and connections. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 64 << 10
    max_prompts: int = 64  # in one completion request
    max_choices: int = 32  # n
    max_sequences: int = 256  # prompts x n
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # of one stop string
    max_logit_bias: int = 1024  # entries
    max_in_flight: int = 2048  # requests being answered; more get 429
    header_timeout: float = 15.0  # from a request's first byte to the end of its headers
    body_timeout: float = 60.0  # from there to the end of its body
    write_timeout: float = 120.0  # that a client may leave a full socket unread
    keep_alive_timeout: float = 75.0
    drain_timeout: float = 30.0  # that requests in flight may take to finish once the server is told to stop
    retry_after: int = 1  # what 429 and 503 advise

    @classmethod
    def of(cls, config: ServerConfig) -> "RequestLimits":
        """What the operator may set, as he set it; the rest by default."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__ if hasattr(config, name)})
