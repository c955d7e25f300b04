"""A client of many engines: which engine a request goes to, where it goes on when that ends, and how many there are.

`view`, `costs`, `route` and `scale` are pure functions over frozen structs. They read no clock and draw no random
numbers, so the simulator runs them as they are.
"""

from penstock.cluster.costs import FleetView
from penstock.cluster.index import BlockIndex
from penstock.cluster.route import ROUTES, Route, RouteChoice, round_robin
from penstock.cluster.route import choose as choose
from penstock.cluster.view import ReplicaView, RouteRequest

__all__ = [
    "ROUTES",
    "BlockIndex",
    "FleetView",
    "ReplicaView",
    "Route",
    "RouteChoice",
    "RouteRequest",
    "choose",
    "round_robin",
]
