"""How memory is divided among KV caches."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.serving.kv_budgets import KVNeed, divide_budget

MOST = 400
needs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(50, MOST), st.integers(0, 2 * MOST)).map(lambda each: KVNeed(*each)),
    min_size=1,
    max_size=6,
)


@given(needs, st.integers(0, 1000))
def test_guarantees_hold_and_nothing_is_given_twice(needs: list[KVNeed], more: int) -> None:
    total = sum(each.guarantee for each in needs) + more
    budgets = divide_budget(total, needs)
    assert all(each.guarantee <= budget <= each.most for each, budget in zip(needs, budgets, strict=True))
    assert sum(budgets) <= total
    if sum(budgets) < total - len(needs):
        assert budgets == [each.most for each in needs]


def test_what_is_left_goes_to_those_that_need_it() -> None:
    idle, busy, middle = KVNeed(50, MOST, 0), KVNeed(50, MOST, MOST), KVNeed(50, MOST, 120)
    assert divide_budget(300, [idle, busy, idle]) == [50, 200, 50]
    assert divide_budget(300, [idle, busy, middle]) == [50, 130, 120]
    assert divide_budget(300, [busy, busy, busy]) == [100, 100, 100]
    assert divide_budget(300, [idle, idle, idle]) == [100, 100, 100]
