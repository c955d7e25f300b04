"""A fleet on a Ray cluster of three nodes on this machine, one of which is removed under load.

    python -m tests.ray_cluster.fleet_session FOLDER

Prints a line for each thing that held; ends with an exception at the first that did not.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from ray._private import state
from ray.cluster_utils import Cluster

from penstock.cli.fleet.ray_engines import RayEngines
from penstock.cluster.client import FleetClient
from penstock.cluster.members import Members, find_addresses
from penstock.cluster.place import reconcile
from penstock.engine.remote.connector import connect_engine
from penstock.weights.packaged import EMBEDDED
from tests.e2e.fleet.requests import made, said
from tests.engine.processes import children
from tests.engine.simulated import ask
from tests.patience import until
from tests.ray_cluster.session import loopback_up

KEY = "key-of-the-tests"
FLAGS = (EMBEDDED, "--threads", "1", "--kv-cache-memory", "64MiB", "--max-num-seqs", "32", "--drain-timeout", "1")


async def fleet_of(cluster: Cluster, folder: Path) -> None:
    fleet = FleetClient(clock=time.monotonic)
    file = folder / "engines"
    file.write_text("")

    def load(address: str) -> int | None:
        ready = [one.open_requests for one in fleet.replicas if one.name == address and one.status == "ready"]
        return ready[0] if ready else None

    engines = RayEngines(FLAGS, KEY, 1, file, load)
    members = Members(fleet, find_addresses(f"file:{file}"), lambda address: connect_engine(address, KEY))
    fleet.keep(members.run())

    async def keep(wanted: int) -> None:
        """Reconcile until so many engines serve, and no others are left."""
        end = time.monotonic() + 120
        while True:
            found = await engines.engines()
            await reconcile(engines, found, wanted)
            ready = sum(one.status == "ready" for one in fleet.replicas)
            if ready == wanted == len(found) == len(fleet.replicas):
                return
            assert time.monotonic() < end, (found, [one.status for one in fleet.replicas])
            await asyncio.sleep(0.25)

    try:
        await keep(2)
        print("two engines serve")
        expected = [said(await ask(fleet, made(number, 150))) for number in range(8)]
        nodes = {each["Address"]["NodeID"] for each in state.actors().values() if each["State"] == "ALIVE"}
        assert len(nodes) == 2, "they are on two nodes"
        reading = asyncio.gather(*(ask(fleet, made(number, 150)) for number in range(8)))
        await until(lambda: all(one.parts for one in fleet.replicas), "both to have requests")
        victim = next(node for node in cluster.worker_nodes if node.node_id in nodes)
        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
        assert [said(answer) for answer in await reading] == expected
        assert fleet.moves["ended"] > 0
        print("a node was removed, and no stream lost a token")
        await keep(2)
        print("another engine is in its place")
        await keep(1)
        await keep(0)
        print("no engine is left")
    finally:
        await fleet.close()
        await engines.close()
    assert not [pid for pid in children(os.getpid()) if b"penstock" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def main() -> None:
    loopback_up()
    node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        os.environ["RAY_ADDRESS"] = cluster.address
        asyncio.run(fleet_of(cluster, Path(sys.argv[1])))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
