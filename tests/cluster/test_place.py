"""What the reconciler orders: for every set of engines, and again and again against a provider that is slow."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.place import DRAIN_SECONDS, START_SECONDS, PlacedEngine, orders, reconcile

engines = st.lists(
    st.builds(
        PlacedEngine,
        name=st.text("abcdef", min_size=1, max_size=4),
        status=st.sampled_from(["starting", "ready", "draining"]),
        seconds=st.floats(0, 4000),
        requests=st.integers(0, 9),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


@given(engines, st.integers(0, 12))
def test_orders_leave_what_is_wanted(many: list[PlacedEngine], wanted: int) -> None:
    kill, drain = orders(many, wanted)
    by_name = {one.name: one for one in many}
    assert not set(kill) & set(drain)
    assert all(by_name[name].status != "draining" for name in drain)
    staying = [one for one in many if one.status != "draining" and one.name not in {*kill, *drain}]
    before = [one for one in many if one.status != "draining" and one.name not in kill]
    assert len(staying) == min(wanted, len(before)), "never fewer than wanted, if they are there"
    for name in kill:
        limit = {"starting": START_SECONDS, "draining": DRAIN_SECONDS}[by_name[name].status]
        assert by_name[name].seconds > limit, "one that serves is never killed"
    if any(by_name[name].status == "ready" for name in drain):
        assert all(one.status == "ready" for one in staying), "those that start go first"


@given(engines, st.integers(0, 12))
def test_the_same_picture_gives_the_same_orders(many: list[PlacedEngine], wanted: int) -> None:
    assert orders(many, wanted) == orders(many[::-1], wanted)._replace(kill=orders(many, wanted).kill)
    kill, drain = orders(many, wanted)
    after = [
        PlacedEngine(name=one.name, status="draining") if one.name in drain else one
        for one in many
        if one.name not in kill
    ]
    assert orders(after, wanted).drain == (), "what was ordered once is not ordered for others"


class SlowProvider:
    """A Placement whose engines take rounds to start and to end, and which loses engines and orders by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rounds: dict[str, tuple[str, int]] = {}
        self.made = 0
        self.most = 0

    async def engines(self) -> Sequence[PlacedEngine]:
        for name, (status, left) in list(self.rounds.items()):
            if left:
                self.rounds[name] = status, left - 1
            elif status == "draining" or (status == "ready" and self.chance.random() < 0.02):
                del self.rounds[name]
            else:
                self.rounds[name] = "ready", 0
        return [PlacedEngine(name=name, status=status) for name, (status, _) in self.rounds.items()]

    async def ensure(self, count: int) -> None:
        staying = sum(status != "draining" for status, _ in self.rounds.values())
        for _ in range(count - staying):
            if self.chance.random() < 0.7:  # else the order is lost
                self.made += 1
                self.rounds[f"e{self.made}"] = "starting", self.chance.randrange(5)
        self.most = max(self.most, sum(status != "draining" for status, _ in self.rounds.values()))

    async def drain(self, name: str) -> None:
        if self.chance.random() < 0.7:
            self.rounds[name] = "draining", self.chance.randrange(5)

    async def kill(self, name: str) -> None:
        self.rounds.pop(name, None)

    async def changed(self) -> None:
        """Nothing is reported."""


async def test_lost_orders_are_given_again() -> None:
    for seed in range(20):
        provider = SlowProvider(seed)
        for wanted in (3, 7, 2, 0, 5):
            for _ in range(100):
                engines = await provider.engines()
                await reconcile(provider, engines, wanted)
                if [one.status for one in engines] == ["ready"] * wanted:
                    break
            else:
                raise AssertionError((seed, wanted, provider.rounds))
        assert provider.most <= 7
