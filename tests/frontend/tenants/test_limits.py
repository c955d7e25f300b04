"""What a request is told that exceeds a limit of its tenant."""

import pytest

from penstock.frontend.tenants.limits import quota_error
from penstock.frontend.tenants.quotas import NANO, Amounts, QuotaDecision


@pytest.mark.parametrize(
    ("limit", "left", "wanted", "says"),
    [
        (
            "tokens_per_day",
            (20_000_000, 1_200, 3600.0),
            Amounts(5_000, 0),
            "the limit is 20,000,000 tokens a day, 1,200 are left, and this request may use 5,000; "
            "try again in 3,600 s, or lower max_tokens",
        ),
        (
            "budget_per_month",
            (250 * NANO, 39_000, 200_000.0),
            Amounts(40, 61_000),
            "the limit is 250 of the currency a month, 0.000039 are left, and this request may use 0.000061; "
            "try again in 200,000 s, or lower max_tokens",
        ),
    ],
)
def test_amounts_are_in_full_digits(limit: str, left: tuple[int, int, float], wanted: Amounts, says: str) -> None:
    decision = QuotaDecision(now=0.0, refused=limit, retry_after=left[2], left={limit: left})
    error = quota_error(decision, wanted, [])
    assert (error.status, error.message) == (429, says)
    assert error.retry_after == min(left[2], 86_400)
