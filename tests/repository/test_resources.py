"""Resources that models share: the rules, the settings, and a server whose models take turns."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.repository.settings import SettingsError, read_yaml
from penstock.repository.triton import read_pbtxt
from penstock.schedule.resources import ResourceNeeds, ResourcePool

NEEDS = st.builds(
    ResourceNeeds,
    resources=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1),
    priority=st.integers(1, 3),
)


@settings(deadline=None, max_examples=20)
@given(st.lists(NEEDS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_no_more_is_taken_than_there_is_and_all_run(needs: list[ResourceNeeds], random: Random) -> None:
    """Every model has a batch at any time."""
    units = {name: max(each.resources.get(name, 0) for each in needs) for name in "abc"}
    pool = ResourcePool()
    users = {pool.add(each): each for each in needs}
    running: list[int] = []
    runs: Counter[int] = Counter()
    for _ in range(100):
        for user in random.sample(list(users), len(users)):
            if pool.take(user):
                running.append(user)
                runs[user] += 1
        taken = Counter[str]()
        for user in running:
            taken.update(users[user].resources)
        assert all(taken[name] <= units[name] for name in "abc")
        assert running, "everything is free, and nothing runs"
        ended = running.pop(random.randrange(len(running)))
        pool.give(ended)
    assert set(runs) == set(users)


def test_what_runs_least_is_next_and_a_small_one_does_not_starve_a_large_one() -> None:
    pool = ResourcePool({"memory": 4})
    small, other, large = (pool.add(ResourceNeeds({"memory": units})) for units in (2, 2, 4))
    assert pool.take(small) and pool.take(other) and not pool.take(large)
    pool.give(small)
    assert not pool.take(small) and not pool.take(large)  # its units are kept for the large one
    pool.give(other)
    assert not pool.take(other) and pool.take(large)
    pool.give(large)
    assert pool.take(small) and pool.take(other)
    pool.give(other)
    assert not pool.take(large) and pool.leave(large) and not pool.leave(large) and pool.take(other)


def test_a_run_counts_as_often_as_the_priority_says() -> None:
    pool = ResourcePool()
    users = [pool.add(ResourceNeeds({"gate": 1}, priority)) for priority in (1, 3)]
    runs = Counter[int]()
    for _ in range(400):
        (user,) = (user for user in users if pool.take(user))
        runs[user] += 1
        pool.give(user)
    assert runs[users[0]] == pytest.approx(300, abs=2)


def test_a_model_that_goes_frees_what_it_has() -> None:
    pool = ResourcePool()
    first, second = pool.add(ResourceNeeds({"a": 1})), pool.add(ResourceNeeds({"a": 1}))
    assert pool.take(first) and not pool.take(second)
    assert pool.remove(first) and not pool.remove(first) and pool.take(second)
    pool.give(first)  # of the batch that was running
    with pytest.raises(ValueError, match="needs 3 units of the resource 'a', but there are 2; set a larger --"):
        ResourcePool({"a": 2}).check(ResourceNeeds({"a": 3}))


def test_settings_of_both_kinds() -> None:
    limiter = (
        "rate_limiter { resources [ { name: 'R1' global: true count: 10 }, { name: 'R2' count: 5 } ] priority: 2 }"
    )
    ours = read_yaml("rate-limiter: {resources: {R1: 10, R2: 5}, priority: 2}").rate_limiter
    assert ours == read_pbtxt(f"instance_group [ {{ count: 2 {limiter} }} ]").rate_limiter
    assert ours == ResourceNeeds({"R1": 10, "R2": 5}, 2)
    assert read_pbtxt("instance_group { count: 2 }").rate_limiter == ResourceNeeds()
    with pytest.raises(SettingsError, match="have different rate_limiters"):
        read_pbtxt(f"instance_group [ {{ count: 1 {limiter} }}, {{ count: 1 }} ]")
    for text, message in (
        ("resources: {R1: 0}", "rate-limiter.resources.R1 is 0; it must be from 1"),
        ("priority: 0", "rate-limiter.priority is 0"),
        ("resources: [R1]", "rate-limiter"),
    ):
        with pytest.raises(SettingsError, match=message):
            read_yaml(f"rate-limiter: {{{text}}}")


def test_models_of_a_server_take_turns(tmp_path: Path) -> None:
    """Two models that are slow, on two threads: with one unit, what they compute does not overlap."""
    pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
    import time
    from concurrent.futures import ThreadPoolExecutor

    from tests.e2e.server import serving
    from tests.repository import onnx_files as files
    from tests.repository.onnx_files import put

    for name, units in (("one", 1), ("two", 1), ("free", 0), ("much", 9)):
        limiter = f"rate-limiter: {{resources: {{gate: {units}}}}}" if units else ""
        text = f"max-batch-size: 0\n{limiter}"
        put(tmp_path / "models", name, files.spins(400_000), settings=text)
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    flags = ("--repository", str(tmp_path / "models"), "--state-dir", "none", "--rate-limit-resource", "gate:1")
    with serving(tmp_path / "log", *flags, model=None) as server:
        assert server.post("/v2/models/much/infer", {"inputs": [x]}).status_code == 404
        assert "needs 9 units of the resource 'gate', but there are 1" in (tmp_path / "log").read_text()

        def ask(name: str) -> int:
            return server.post(f"/v2/models/{name}/infer", {"inputs": [x]}).status_code

        def computing(name: str) -> float:
            stats = server.get(f"/v2/models/{name}/stats").json()["model_stats"][0]
            return float(stats["inference_stats"]["compute_infer"]["ns"]) / 1e9

        def overlap(*names: str) -> float:
            """The seconds that runs took, in all, of those that passed."""
            before, began = sum(map(computing, names)), time.monotonic()
            with ThreadPoolExecutor(8) as pool:
                assert set(pool.map(ask, names * 4)) == {200}
            took = time.monotonic() - began
            return (sum(map(computing, names)) - before) / took

        assert [ask(name) for name in ("one", "two", "free")] == [200] * 3
        assert overlap("one", "free") > 1.2
        assert overlap("one", "two") <= 1
