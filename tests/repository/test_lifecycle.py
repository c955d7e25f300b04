"""The reconciler: what it loads and unloads, and that it comes to an end."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.repository.lifecycle import Action, Observed, Wanted, reconcile

OLD, NEW = ("m", 1, "old"), ("m", 1, "new")


def test_a_new_version_is_loaded_before_the_old_one_goes() -> None:
    wanted = [Wanted(NEW, 10)]
    assert reconcile(wanted, [Observed(OLD, "ready", 10)], 20) == [Action("load", NEW)]
    assert reconcile(wanted, [Observed(OLD, "ready", 10), Observed(NEW, "loading", 10)], 20) == []
    both = [Observed(OLD, "ready", 10), Observed(NEW, "ready", 10)]
    assert reconcile(wanted, both, 0) == [Action("drain", OLD)]
    draining = [Observed(OLD, "draining", 10, requests=1), Observed(NEW, "ready", 10)]
    assert reconcile(wanted, draining, 0) == []
    assert reconcile(wanted, [Observed(OLD, "draining", 10), Observed(NEW, "ready", 10)], 0) == [Action("drop", OLD)]


def test_a_version_that_failed_leaves_the_one_that_serves() -> None:
    there = [Observed(OLD, "ready", 10), Observed(NEW, "failed", 10)]
    assert reconcile([Wanted(NEW, 10)], there, 20) == []
    assert reconcile([Wanted(OLD, 10)], there, 20) == [Action("drop", NEW)]


def test_what_does_not_fit_waits_with_the_number() -> None:
    other = ("n", 1, "x")
    wanted = [Wanted(NEW, 10), Wanted(other, 10)]
    assert reconcile(wanted, [], 15) == [Action("load", NEW), Action("wait", other, 5)]
    assert reconcile(wanted, [Observed(NEW, "loading", 10)], 15) == [Action("wait", other, 5)]


KEYS = st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.sampled_from("xy"))


@given(st.lists(st.lists(KEYS, unique=True, max_size=4), min_size=1, max_size=5), st.data())
def test_it_comes_to_rest_and_a_served_model_is_never_without_a_version(steps: list, data: st.DataObject) -> None:
    states: dict[tuple[str, int, str], str] = {}
    for wanted in steps:
        for key in [key for key, state in states.items() if state == "failed"]:
            del states[key]
        for _ in range(20):
            served = {key[0] for key, state in states.items() if state == "ready"}
            actions = reconcile(
                [Wanted(key, 1) for key in wanted], [Observed(*each, 1) for each in states.items()], 100
            )
            for action in actions:
                if action.kind == "load":
                    states[action.key] = "loading"
                elif action.kind == "drain":
                    states[action.key] = "draining"
                else:
                    del states[action.key]
            for key in [key for key, state in states.items() if state == "loading"]:
                states[key] = data.draw(st.sampled_from(["ready", "failed"]))
            still = {key[0] for key, state in states.items() if state == "ready"}
            assert served & {key[0] for key in wanted} <= still
            if not actions:
                break
        else:
            raise AssertionError("it does not come to rest")
        if "failed" not in states.values():
            assert set(states) == set(wanted)
