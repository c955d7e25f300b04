"""What a tenant with few clients feels of one with many, and what it costs all together, on a virtual clock.

`benchmarks/tenants.py` measures the same on a real server.
"""

from penstock.messages import TenantShare
from tests.schedule.closed_loop import Clients, run

BATCH = TenantShare(rank=1, held_back=2, step_tokens=64)


def test_two_clients_beside_two_hundred_start_soon_and_cost_no_throughput() -> None:
    """A request that comes waits for the step that runs, and begins with the next one."""
    light = Clients(2)
    both = {"light": light, "heavy": Clients(200)}
    alone = run({"light": light}, fair=True)
    shared, first_come = run(both, fair=True, steps=1200), run(both, fair=False, steps=1200)
    assert shared.p99("light") <= 2 * alone.p99("light") + shared.step_seconds
    assert first_come.p99("light") > 20 * shared.p99("light"), "first come, first served, they wait in the queue"
    assert shared.throughput >= 0.98 * first_come.throughput
    assert shared.preemptions > 10, "places were taken, which costs tokens that are computed again"
    computed = [each.computed / each.tokens.total() for each in (shared, first_come)]
    assert computed[0] <= 1.02 * computed[1]


def test_interactive_requests_beside_batch_scoring_start_soon() -> None:
    """One a second, of a class for which two places are kept free, beside a class with few prompt tokens in a step."""
    now = Clients(1, every=1.0)
    alone = run({"now": now}, fair=True)
    beside = run({"now": now, "batch": Clients(60, share=BATCH)}, fair=True, steps=2500)
    assert len(beside.first["now"]) > 20
    assert beside.p99("now") <= 1.5 * alone.p99("now") + beside.step_seconds
    assert beside.tokens["batch"] > 20 * beside.tokens["now"]
