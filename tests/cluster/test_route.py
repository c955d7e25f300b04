"""The choice of an engine: what holds for every fleet and request, and what it does in typical cases."""

import statistics
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import ROUTES, FleetView, ReplicaView, RouteRequest, choose, round_robin
from tests.cluster.views import fleet, replica

NAMES = [f"engine-{number}" for number in range(6)]
counts = st.integers(0, 2000)
seeds = st.integers(0, 2**64)
seconds = st.floats(0, 10)


@st.composite
def fleets(draw: st.DrawFn) -> FleetView:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return fleet(
        *(
            replica(
                name,
                status=draw(st.sampled_from(["starting", "ready", "ready", "suspect", "draining", "gone"])),
                pool=draw(st.sampled_from(["a", "a", "b"])),
                role=draw(st.sampled_from(["alone", "alone", "both", "prefill", "decode"])),
                region=draw(st.sampled_from(["", "here", "there"])),
                round_trip=draw(st.sampled_from([0.0, 0.001, 0.08])),
                running=draw(counts),
                waiting=draw(counts),
                backlog_tokens=draw(st.integers(0, 10**6)),
                kv_usage=draw(st.floats(0, 1)),
                stats_age=draw(seconds),
                booked_requests=draw(counts),
                booked_tokens=draw(counts),
                recent_tokens=draw(st.floats(0, 1e6)),
                prefill_seconds=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
                measured=draw(st.sampled_from([0.0, 0.5, 1.0])),
            )
            for name in names
        )
    )


@st.composite
def requests(draw: st.DrawFn) -> RouteRequest:
    tokens = draw(st.integers(1, 150_000))
    return RouteRequest(
        prompt_tokens=tokens,
        max_tokens=draw(st.integers(0, 1000)),
        cached=draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, tokens))),
        pool=draw(st.sampled_from(["", "a", "b", "c"])),
        reads_pages=draw(st.booleans()),
        regions=draw(st.sampled_from([(), (), ("here",), ("here", "there")])),
        excluded=frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=2))),
    )


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@given(view=fleets(), request=requests(), seed=seeds)
def test_no_route_names_an_engine_that_may_not_get_the_request(route, view, request, seed) -> None:
    choice = route(view, request, seed)
    assert len(set(choice.replicas)) == len(choice.replicas)
    for name in choice.replicas:
        found = view.replica(name)
        assert found is not None and found.status == "ready" and name not in request.excluded
        assert request.pool in ("", found.pool)
        assert not request.regions or found.region in request.regions
    if choice.source:
        assert view.replica(choice.source).region == view.replica(choice.replicas[0]).region
        assert request.prompt_tokens <= found.max_model_len
    assert {*choice.replicas, *(name for name, _ in choice.refused)} == {each.name for each in view.replicas}
    assert choice == route(view, request, seed), "it is a function of its arguments"


@given(view=fleets(), request=requests(), seed=seeds, more=st.integers(1, 1000), data=st.data())
def test_more_load_never_makes_a_score_better(view, request, seed, more, data) -> None:
    before = choose(view, request, seed)
    if not before.replicas:
        return
    name = data.draw(st.sampled_from(before.replicas))
    field = data.draw(st.sampled_from(["booked_requests", "booked_tokens"]))
    loaded = fleet(
        *(
            msgspec.structs.replace(each, **{field: getattr(each, field) + more}) if each.name == name else each
            for each in view.replicas
        )
    )
    after = choose(loaded, request, seed)
    was = dict(zip(before.replicas, before.seconds, strict=True))
    now = dict(zip(after.replicas, after.seconds, strict=True))
    assert now[name] >= was[name]
    del was[name], now[name]
    assert now == was


@given(view=fleets(), more=st.lists(st.tuples(st.sampled_from(NAMES), counts), max_size=4))
def test_what_was_sent_changes_only_its_engine(view, more) -> None:
    """A view that follows what is sent is the one that is made anew."""
    known = {each.name: each for each in view.replicas}
    followed = view
    for name, tokens in more:
        if name in known:
            known[name] = msgspec.structs.replace(known[name], booked_tokens=known[name].booked_tokens + tokens)
            followed = followed.changed([(list(known).index(name), known[name])])
    assert followed == fleet(*known.values())


@given(view=fleets(), request=requests(), seed=seeds, age=st.floats(0, 1e6))
def test_old_statistics_exclude_nobody(view, request, seed, age) -> None:
    old = fleet(*(msgspec.structs.replace(each, stats_age=age) for each in view.replicas))
    assert set(choose(old, request, seed).replicas) == set(choose(view, request, seed).replicas)


def test_a_prompt_follows_its_prefix() -> None:
    view = fleet(replica("cold"), replica("warm", running=3))
    request = RouteRequest(prompt_tokens=8000, cached={"warm": 7900})
    assert {choose(view, request, seed).replicas[0] for seed in range(50)} == {"warm"}


def test_a_prefix_is_left_where_it_costs_more_than_it_saves() -> None:
    request = RouteRequest(prompt_tokens=8000, cached={"warm": 7900})
    queue = replica("warm", running=30, backlog_tokens=40_000)
    assert choose(fleet(replica("cold"), queue), request, 1).replicas[0] == "cold"
    full = replica("warm", running=32, waiting=40)
    assert choose(fleet(replica("cold"), full), request, 1).replicas[0] == "cold"


def test_a_cold_prompt_goes_to_the_least_loaded() -> None:
    view = fleet(replica("a", running=9), replica("b", running=2), replica("c", running=12, waiting=3))
    assert choose(view, RouteRequest(prompt_tokens=2000), 7).replicas == ("b", "a", "c")


def test_long_prompts_avoid_engines_where_many_decode() -> None:
    """Each of them would be delayed by the prefill."""
    view = fleet(replica("busy", running=20), replica("queued", running=1, backlog_tokens=3000))
    assert choose(view, RouteRequest(prompt_tokens=8000), 1).replicas[0] == "queued"


def test_a_long_prompt_does_not_queue_to_spare_a_few_sequences() -> None:
    """Else engines with sequences get no prompts, and all prompts queue at the others."""
    view = fleet(replica("decodes", running=5), replica("queue", running=2, backlog_tokens=20_000))
    assert choose(view, RouteRequest(prompt_tokens=17_000), 1).replicas[0] == "decodes"


def test_memory_that_must_be_freed_first_counts() -> None:
    view = fleet(replica("full", running=4, kv_usage=0.99), replica("free", running=4))
    assert choose(view, RouteRequest(prompt_tokens=8000), 1).replicas[0] == "free"


def test_a_slower_machine_gets_less() -> None:
    slow = replica("slow", prefill_seconds=4e-4, step_seconds=0.08)
    assert choose(fleet(slow, replica("fast", running=2)), RouteRequest(prompt_tokens=500), 1).replicas[0] == "fast"


def test_the_near_region_is_first_until_its_queue_is_longer_than_the_way() -> None:
    far = replica("far", region="far", round_trip=0.08)
    request = RouteRequest(prompt_tokens=200)
    for waiting, first in ((0, "near"), (700, "near"), (2500, "far")):  # at 0.1 ms a token
        near = replica("near", region="near", round_trip=0.001, backlog_tokens=waiting)
        assert {choose(fleet(near, far), request, seed).replicas[0] for seed in range(50)} == {first}


def test_engines_of_a_region_are_equally_far() -> None:
    view = fleet(*(replica(f"{number}", region="r", round_trip=0.0001 * 2**number) for number in range(6)))
    assert {choose(view, RouteRequest(prompt_tokens=100), seed).replicas[0] for seed in range(100)} == set("012345")


def test_a_bound_request_waits_for_its_regions_and_the_reason_says_so() -> None:
    view = fleet(replica("a", region="here"), replica("b", region="there", status="gone"), replica("c"))
    choice = choose(view, RouteRequest(prompt_tokens=100, regions=("there",)), 1)
    assert not choice.replicas and not choice.too_large
    assert choice.reason == (
        "a: it is in region here, and the tenant's requests stay in there; b: gone; "
        "c: it has no --region, and the tenant's requests stay in there"
    )


def test_noise_of_measurements_does_not_choose() -> None:
    view = fleet(replica("a", step_seconds=0.020), replica("b", step_seconds=0.021))
    assert {choose(view, RouteRequest(prompt_tokens=100), seed).replicas[0] for seed in range(50)} == {"a", "b"}
    warm = RouteRequest(prompt_tokens=100, cached={"b": 64})
    assert {choose(view, warm, seed).replicas[0] for seed in range(50)} == {"b"}


def test_an_engine_is_not_avoided_for_its_first_steps() -> None:
    """They may be slow by chance, or not tell how their time divides; an engine that then gets nothing is not measured
    again."""
    odd = replica("odd", prefill_seconds=2.5e-4, measured=0.1)
    known = replica("known", measured=0.9, recent_tokens=1000.0)
    request = RouteRequest(prompt_tokens=300, max_tokens=8)
    assert {choose(fleet(odd, known), request, seed).replicas[0] for seed in range(50)} == {"odd"}
    odd = msgspec.structs.replace(odd, measured=0.9)
    assert {choose(fleet(odd, known), request, seed).replicas[0] for seed in range(50)} == {"known"}


def test_the_reason_names_every_engine() -> None:
    view = fleet(replica("a", status="draining"), replica("b", pool="other"), replica("c", max_model_len=10))
    choice = choose(view, RouteRequest(prompt_tokens=100, pool="this"), 1)
    assert choice.replicas == ()
    assert choice.reason == "a: draining; b: it has other weights or numerics; c: it has other weights or numerics"
    choice = choose(view, RouteRequest(prompt_tokens=100, excluded=frozenset(["b"])), 1)
    assert choice.reason.endswith("c: 100 tokens exceed its limit of 10 (--max-model-len)")
    assert choose(fleet(), RouteRequest(prompt_tokens=100), 1).reason == "there are no engines"


def spread(view: FleetView, requests: list[RouteRequest], *, booked: bool) -> float:
    """The coefficient of variation of the prompt tokens that each engine computes."""
    replicas = {each.name: each for each in view.replicas}
    computed: Counter[str] = Counter(dict.fromkeys(replicas, 0))
    for seed, request in enumerate(requests):
        name = choose(FleetView.of(replicas.values()), request, seed).replicas[0]
        uncached = request.prompt_tokens - request.cached.get(name, 0)
        computed[name] += uncached
        changes: dict[str, object] = {"recent_tokens": replicas[name].recent_tokens + uncached}
        if booked:
            changes["booked_requests"] = replicas[name].booked_requests + 1
        replicas[name] = msgspec.structs.replace(replicas[name], **changes)
    return statistics.pstdev(computed.values()) / statistics.mean(computed.values())


@pytest.mark.parametrize("booked", [False, True], ids=["nothing in flight", "all at once"])
def test_independent_requests_are_spread_evenly(booked: bool) -> None:
    view = fleet(*(replica(f"engine-{number}", max_num_seqs=1000) for number in range(8)))
    requests = [RouteRequest(prompt_tokens=50 + 37 * number % 1000) for number in range(1000)]
    assert spread(view, requests, booked=booked) <= 0.1


def test_paced_sessions_are_spread_evenly() -> None:
    """Each session stays where its prefix is, and nothing is in flight when a request comes."""
    replicas = {f"engine-{number}": replica(f"engine-{number}") for number in range(8)}
    home: dict[int, tuple[str, int]] = {}
    computed: Counter[str] = Counter(dict.fromkeys(replicas, 0))
    moved = 0
    for seed in range(1600):
        session = 37 * seed % 200
        name, before = home.get(session, ("", 0))
        tokens = before + 60 + 11 * session % 100
        cached = {name: before} if name else {}
        chosen = choose(fleet(*replicas.values()), RouteRequest(prompt_tokens=tokens, cached=cached), seed).replicas[0]
        moved += bool(name) and chosen != name
        computed[chosen] += tokens - cached.get(chosen, 0)
        recent = replicas[chosen].recent_tokens + tokens - cached.get(chosen, 0)
        replicas[chosen] = msgspec.structs.replace(replicas[chosen], recent_tokens=recent)
        home[session] = chosen, tokens
    assert moved == 0
    assert statistics.pstdev(computed.values()) / statistics.mean(computed.values()) <= 0.1


@pytest.mark.parametrize("delay", [0, 50])
def test_two_fronts_with_old_statistics_do_not_herd(delay: int) -> None:
    """Each sees what it has booked itself, and the other's requests `delay` choices later."""
    names = [f"engine-{number}" for number in range(8)]
    sent: list[tuple[int, str]] = []  # (front, engine)
    for seed in range(400):
        front = seed % 2
        seen = sent[: max(len(sent) - delay, 0)]
        running = Counter(name for _, name in seen)
        booked = Counter(name for one, name in sent[len(seen) :] if one == front)
        view = fleet(
            *(
                replica(name, max_num_seqs=1000, running=running[name], booked_requests=booked[name], stats_age=2.0)
                for name in names
            )
        )
        sent.append((front, choose(view, RouteRequest(prompt_tokens=300), seed * 7919).replicas[0]))
    totals = Counter(name for _, name in sent)
    assert max(totals[name] for name in names) <= 1.3 * 400 / 8


def test_round_robin_takes_turns() -> None:
    view = fleet(replica("a"), replica("b"), replica("c"))
    chosen = [round_robin(view, RouteRequest(prompt_tokens=9), turn).replicas for turn in range(4)]
    assert chosen == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_a_choice_among_64_engines_is_fast() -> None:
    """The bound of benchmarks/fleet.py is 0.3 ms for the slowest of 100; a busy machine gets more here."""
    view = fleet(*(replica(f"engine-{number}", running=number % 7) for number in range(64)))
    request = RouteRequest(prompt_tokens=32_000, cached={f"engine-{number}": 500 * number for number in range(64)})
    taken = []
    for seed in range(200):
        began = time.thread_time()
        choose(view, request, seed)
        taken.append(time.thread_time() - began)
    assert statistics.median(taken) < 0.002


def test_unmeasured_engines_get_requests() -> None:
    view = fleet(ReplicaView(name="new", max_num_seqs=8, max_model_len=1000), replica("known", running=3))
    assert choose(view, RouteRequest(prompt_tokens=100), 1).replicas[0] == "new"


# -- KV blocks of other engines ---------------------------------------------------------------------------------------


def apart(**changes) -> FleetView:
    return fleet(
        replica("prefill", role="prefill", **changes), replica("decode", role="decode", running=8, kv_usage=0.1)
    )


def test_a_long_prompt_for_a_busy_engine_is_computed_elsewhere() -> None:
    choice = choose(apart(), RouteRequest(prompt_tokens=4000), 1)
    assert choice.replicas == ("decode", "prefill") and choice.source == "prefill" and choice.computes


@pytest.mark.parametrize(
    ("view", "request_"),
    [
        (apart(), RouteRequest(prompt_tokens=10)),
        (apart(), RouteRequest(prompt_tokens=4000, cached={"decode": 3990})),
        (apart(), RouteRequest(prompt_tokens=4000, reads_pages=False)),
        (apart(status="draining"), RouteRequest(prompt_tokens=4000)),
        (apart(pool="other"), RouteRequest(prompt_tokens=4000)),
        (apart(backlog_tokens=10**6), RouteRequest(prompt_tokens=4000)),
        (fleet(replica("prefill", role="prefill"), replica("decode", role="decode")), RouteRequest(prompt_tokens=4000)),
    ],
    ids=["short", "cached", "prompt logprobs", "it drains", "another pool", "a long queue there", "an idle engine"],
)
def test_other_prompts_are_computed_where_they_are_answered(view: FleetView, request_: RouteRequest) -> None:
    choice = choose(view, request_, 1)
    assert choice.replicas[0] == "decode" and not choice.computes


def test_blocks_are_read_from_an_engine_that_has_them() -> None:
    """Also from one that drains, as its requests move."""
    request = RouteRequest(prompt_tokens=4000, cached={"leaves": 3900})
    for status in ("ready", "draining"):
        leaves = replica("leaves", role="both", status=status, running=30, backlog_tokens=10**5)
        choice = choose(fleet(leaves, replica("other", role="both", running=2)), request, 1)
        assert (choice.replicas[0], choice.source, choice.computes) == ("other", "leaves", False)


def test_engines_for_prompts_answer_if_no_other_is_left() -> None:
    view = fleet(replica("one", role="prefill"), replica("two", role="decode", status="gone"))
    choice = choose(view, RouteRequest(prompt_tokens=4000), 1)
    assert choice.replicas == ("one",) and not choice.source
