"""Summaries of chats that are too long, with tenants."""

from collections.abc import Callable

from tests.frontend.conftest import NAME
from tests.frontend.tenants.conftest import TenantSite
from tests.frontend.tenants.test_ledger import rows
from tests.frontend.test_context_policy import conversation
from tests.frontend.test_summaries import CONTEXT, summarising


async def test_tenants_share_no_summary_and_pay_for_theirs(tenant_site: Callable[..., TenantSite]) -> None:
    prices = [{"since": "2026-01-01", "input": 2.0, "output": 6.0, "cached": 1.0}]
    limits = {"limits": {"tokens_per_day": 100_000}}
    made = tenant_site(
        {"a": limits, "b": {}},
        prices=prices,
        currency="EUR",
        config={"context_policy": f"summarise:{NAME}", "max_model_len": CONTEXT},
    )
    site = made.site
    summarising(site)
    body = {"model": NAME, "messages": conversation(50), "max_tokens": 8}
    for key, new in (("a/default", True), ("b/default", True), ("a/default", False)):
        answer = await site.http.post("/v1/chat/completions", json=body, headers=made.headers(key))
        assert answer.status_code == 200 and ("x-summary-tokens" in answer.headers) == new
    await made.close()
    found = rows(made)
    written = [row for row in found if row["route"] == "summary"]
    assert [row["tenant"] for row in written] == ["a", "b"] and len(found) == 5
    used = answer.json()["usage"]
    for row in written:
        request = next(each for each in site.engine.requests if each.request_id.startswith(row["id"]))
        assert row["prompt"] == len(request.prompt_ids) and row["model"] == NAME and row["nano"] > 0
        assert row["nano"] == round(1000 * (2.0 * row["prompt"] + 6.0 * row["output"]))
        assert row["request_id"] and row["error"] == ""
    others = [row for row in found if row["route"] != "summary"]
    assert {row["prompt"] for row in others} == {used["prompt_tokens"]}, "an answer's usage is without its summary"
