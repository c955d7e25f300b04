"""Pictures of fleets, for tests of the policies."""

from penstock.cluster import FleetView, ReplicaView


def replica(name: str, **fields: object) -> ReplicaView:
    """An idle engine of which everything has been measured."""
    idle = {
        "max_num_seqs": 32,
        "max_model_len": 100_000,
        "kv_tokens": 200_000,
        "prefill_seconds": 1e-4,
        "step_seconds": 0.02,
        "row_seconds": 2e-4,
        "request_seconds": 5.0,
    }
    return ReplicaView(name=name, **{**idle, **fields})


def fleet(*replicas: ReplicaView) -> FleetView:
    return FleetView.of(replicas)
