"""Limits of tenants: nothing is overspent, each request is settled once, and headers say what is left."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.tenants.quotas import LIFE, NANO, Amounts, Quotas, counter_key, window
from tests.frontend.tenants.conftest import TenantSite
from tests.patience import PATIENCE

Sites = Callable[..., TenantSite]
NOW = 1_800_000_000.0


@given(
    limit=st.integers(0, 60),
    places=st.none() | st.integers(1, 3),
    events=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 20), st.integers(0, 40)), max_size=60
    ),
)
@settings(max_examples=200)
def test_nothing_is_overspent_and_everything_is_settled_once(
    limit: int, places: int | None, events: list[tuple[int, int, int, int]]
) -> None:
    """Requests reserve and settle in any order, some twice, some never, while time goes on."""
    quotas, now = Quotas(), NOW
    limits = QuotaLimits(tokens_per_minute=limit, concurrent_requests=places)
    held: dict[int, tuple[str, int]] = {}
    spent: dict[str, int] = {}
    for number, reserved, used, seconds in events:
        now += seconds
        name, key = str(number), counter_key("t", "tokens", "minute", window("minute", now)[0])
        if number in held:
            where, most = held.pop(number)
            actual = min(used, most)
            quotas.settle(name, Amounts(actual))
            quotas.settle(name, Amounts(0))
            spent[where] = spent.get(where, 0) + actual
        else:
            decision = quotas.reserve(name, "t", limits, Amounts(reserved), now)
            again = quotas.reserve(name, "t", limits, Amounts(reserved), now) if not decision.refused else decision
            assert again.refused == decision.refused
            if not decision.refused:
                held[number] = key, reserved
                assert places is None or len(held) <= places
        total = spent.get(key, 0) + sum(most for where, most in held.values() if where == key)
        assert quotas.used.get(key, 0) == total <= limit or not quotas.used.get(key, 0)


def test_what_is_never_settled_is_given_back_after_its_life() -> None:
    quotas, limits = Quotas(), QuotaLimits(tokens_per_month=100, concurrent_requests=1)
    assert not quotas.reserve("lost", "t", limits, Amounts(90), NOW).refused
    assert quotas.reserve("next", "t", limits, Amounts(20), NOW + 1).refused == "concurrent_requests"
    assert not quotas.reserve("later", "t", limits, Amounts(20), NOW + LIFE + 1).refused


@pytest.mark.parametrize(
    ("period", "now", "name", "ends"),
    [
        ("minute", 120.0, "2", 180.0),
        ("day", 86_400.0, "1", 172_800.0),
        ("month", 0.0, "1970-01", 31 * 86_400.0),
        ("month", 31 * 86_400.0 - 1 + 334 * 86_400.0, "1970-12", 365 * 86_400.0),
    ],
)
def test_windows(period: Any, now: float, name: str, ends: float) -> None:
    assert window(period, now) == (name, ends)


async def test_requests_a_minute(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"limits": {"requests_per_minute": 2}}, "b": {}})
    first = await site.ask("a/default")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert 1 <= int(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert (await site.ask("a/default")).status_code == 200
    refused = await site.ask("a/default")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert "the limit is 2 requests a minute, 0 are left" in error["message"]
    other = await site.ask("b/default")
    assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers


async def test_tokens_are_reserved_by_max_tokens_and_settled_by_use(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"limits": {"tokens_per_minute": 200}}})
    prompt = len((await _request(site)).prompt_ids)
    used = prompt + 4
    second = await site.ask("a/default", max_tokens=60 - prompt)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == 200 - used - 60
    refused = await site.ask("a/default", max_tokens=201)
    assert refused.status_code in (400, 429)
    site.site.engine.output = lambda request, choice: [site.site.engine.info.eos_token_ids[0]]
    for _ in range(8):
        left = await site.ask("a/default", max_tokens=20)
    assert left.status_code == 200, "stopped outputs were settled by what they used"


async def _request(site: TenantSite) -> Any:
    assert (await site.ask("a/default")).status_code == 200
    return site.site.engine.requests[-1]


async def test_a_request_larger_than_the_limit_is_not_to_be_tried_again(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"limits": {"tokens_per_day": 5}}})
    refused = await site.ask("a/default", max_tokens=30)
    assert refused.status_code == 429 and "it can never start" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers


async def test_requests_at_a_time(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"limits": {"concurrent_requests": 2}}})
    site.site.engine.gate = asyncio.Event()
    asked = [asyncio.create_task(site.ask("a/default")) for _ in range(3)]
    done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
    assert [task.result().status_code for task in done] == [429]
    site.site.engine.gate.set()
    assert [(await task).status_code for task in pending] == [200, 200]
    assert (await site.ask("a/default")).status_code == 200


async def test_a_budget_is_spent_to_its_end_and_not_beyond(tenant_site: Sites) -> None:
    """64 clients at a time. Costs are those of the price book."""
    site = tenant_site(
        {"a": {"limits": {"budget_per_month": 0.001}}},
        prices=[{"since": "2026-01-01", "input": 1.0, "output": 5.0}, {"since": "2020-01-01", "input": 9, "output": 9}],
        currency="EUR",
    )
    answers = await asyncio.gather(*(site.ask("a/default") for _ in range(200)))
    answered = [answer for answer in answers if answer.status_code == 200]
    assert 0 < len(answered) < 200
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 429} == {"insufficient_quota"}
    prompt = len(site.site.engine.requests[0].prompt_ids)
    each = prompt * 1.0 / 1e6 + 4 * 5.0 / 1e6
    for _ in range(60):
        answered += [answer for answer in [await site.ask("a/default")] if answer.status_code == 200]
    assert len(answered) == int(0.001 / each)
    assert len(answered) * each <= 0.001
    assert NANO * each == pytest.approx(round(NANO * each))


async def test_a_clock_that_jumps_changes_no_window(tenant_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tenant_site({"a": {"limits": {"requests_per_minute": 2}}})
    real = time.time
    statuses = []
    for jump in (0, 86_400, -86_400, 3600):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        statuses.append((await site.ask("a/default")).status_code)
    assert statuses in ([200, 200, 429, 429], [200, 200, 429, 200], [200, 200, 200, 429]), "a minute may end meanwhile"
