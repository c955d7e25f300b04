"""What a front knows about the engines of a fleet at one moment: frozen structs, the input of every policy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from penstock.messages import EngineRole

# starting: not ready yet, or started again. suspect: it has work and completes no step. draining: it finishes what it
# has and gets nothing new. gone: the connection is lost.
ReplicaStatus = Literal["starting", "ready", "suspect", "draining", "gone"]

_NOTHING: Mapping[str, int] = MappingProxyType({})


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    The statistics are the engine's and count the requests of all fronts. They are `stats_age` seconds old. What this
    front has sent since then is in `booked_requests` and `booked_tokens`.
    """

    name: str
    incarnation: int = 0
    status: ReplicaStatus = "ready"
    pool: str = ""  # digest of weights and numerics: a stream goes on token-exactly only within a pool
    role: EngineRole = "alone"
    region: str = ""
    round_trip: float = 0.0  # seconds from here to the engine's machine and back, measured

    max_num_seqs: int = 1
    max_model_len: int = 1
    kv_tokens: int = 0  # tokens that the KV cache holds; 0: unknown

    running: int = 0  # sequences
    waiting: int = 0  # requests
    backlog_tokens: int = 0  # prompt tokens of these that are not computed yet
    kv_usage: float = 0.0  # share of blocks that requests hold
    stats_age: float = 0.0

    prefill_seconds: float = 0.0  # for a prompt token, measured
    step_seconds: float = 0.0  # fixed part of a step
    row_seconds: float = 0.0  # of a step, for each sequence that decodes
    measured: float = 1.0  # share by which these three count, beside the means of the fleet
    request_seconds: float = 0.0  # mean time for which a sequence runs

    booked_requests: int = 0
    booked_tokens: int = 0  # of their prompts, without what is cached
    recent_tokens: float = 0.0  # prompt tokens computed there lately; older ones count less


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a routing policy knows about a request."""

    prompt_tokens: int  # and the output so far, of one that goes on elsewhere
    max_tokens: int = 0  # that may follow; 0: unknown
    cached: Mapping[str, int] = _NOTHING  # tokens that the prefix cache of each replica probably has
    pool: str = ""  # "": any
    regions: tuple[str, ...] = ()  # of the engines that may get it; (): all
    reads_pages: bool = True  # KV blocks of another engine may be used for it
    excluded: frozenset[str] = frozenset()  # names of replicas
