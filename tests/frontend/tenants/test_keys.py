"""Keys of tenants: which are valid, what they allow, and that a reload changes both."""

import asyncio
import datetime
import logging
from collections.abc import Callable

import pytest

from penstock.frontend.wires import WIRES
from tests.frontend.tenants.conftest import TenantSite

Sites = Callable[..., TenantSite]
TODAY = datetime.datetime.now(datetime.UTC).date()
YESTERDAY = TODAY - datetime.timedelta(days=1)


async def test_only_valid_keys_of_the_file_open(tenant_site: Sites, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"ci": {}, "old": {"expires": str(YESTERDAY)}, "today": {"expires": str(TODAY)}}
    site = tenant_site({"search": {"keys": keys}, "chat": {}})
    good = site.keys["search/ci"]
    wrong = [
        "",
        "x",
        good[:-1],
        good + "x",
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        "psk-" + "0" * 12 + good[16:],
    ]
    with caplog.at_level(logging.INFO, "penstock.access"):
        for key in ("search/ci", "search/today", "chat/default"):
            assert (await site.ask(key)).status_code == 200
        for key in ("search/old", *wrong):
            answer = await site.ask(key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), key
    shown = [record.fields.get("key") for record in caplog.records if record.name == "penstock.access"]  # type: ignore[attr-defined]
    assert shown[:3] == ["search/ci", "search/today", "chat/default"]
    assert not [key for key in site.keys.values() if key in caplog.text or key[17:] in str(shown)]


async def test_every_route_refuses_a_wrong_key(tenant_site: Sites) -> None:
    site = tenant_site({"search": {"keys": {"default": {}, "old": {"expires": str(YESTERDAY)}}}, "gone": {}})
    good, gone = site.keys["search/default"], site.keys["gone/default"]
    site.write({"tenants": {"search": {"keys": {"default": {}, "old": {"expires": str(YESTERDAY)}}}}})
    site.site.app.keys.reload()
    changed = good[:-1] + ("A" if good[-1] != "A" else "B")
    wrong = ["", "wrong", good[:-1] + "!", good + "x", changed, good[:17] + gone[17:], gone, site.keys["search/old"]]
    routes = {(route.method, route.path) for wire in WIRES for route in wire.routes if not route.public}
    pages = {("GET", route.path) for wire in WIRES for route in wire.routes if route.public}
    for method, path in sorted(routes):
        if (method, path) in pages:
            continue
        path = path.replace("{id:path}", "x").replace("{id}", "x").replace("{name:path}", "x").replace("{name}", "x")
        for key in wrong:
            answer = await site.http.request(method, path, headers=site.headers(key))
            assert answer.status_code in (401, 426), (method, path, key)


async def test_a_key_is_for_its_wires_and_models_alone(tenant_site: Sites) -> None:
    site = tenant_site({"a": {"keys": {"claude": {"wires": ["anthropic"]}, "other": {"models": ["large"]}}}})
    answer = await site.ask("a/claude")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wire_not_allowed")
    messages = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "model": "tiny"}
    answer = await site.http.post("/v1/messages", json=messages, headers={"x-api-key": site.keys["a/claude"]})
    assert answer.status_code == 200, answer.text
    answer = await site.ask("a/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")


async def test_an_admin_key_may_reload_and_others_may_not(tenant_site: Sites) -> None:
    site = tenant_site({"ops": {"keys": {"root": {"admin": True}, "plain": {}}}})
    for key, status in (("ops/root", 200), ("ops/plain", 403), ("", 403)):
        assert (await site.http.get("/is_sleeping", headers=site.headers(key))).status_code == status


async def test_a_reload_adds_and_removes_keys_and_a_wrong_file_changes_nothing(
    tenant_site: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    site = tenant_site({"a": {}, "b": {}})
    site.write({"tenants": {"a": {}, "c": {}}})
    site.site.app.keys.reload()
    statuses = [(await site.ask(key)).status_code for key in ("a/default", "b/default", "c/default")]
    assert statuses == [200, 401, 200]
    site.file.write_text("tenants: {a: {weight: -1}}")
    with caplog.at_level(logging.ERROR):
        site.site.app.keys.reload()
    assert "weight: it is -1; give a number above 0" in caplog.text
    assert (await site.ask("c/default")).status_code == 200


async def test_anonymous_requests_are_a_tenant_with_limits(tenant_site: Sites) -> None:
    site = tenant_site({"a": {}}, anonymous={"limits": {"requests_per_minute": 1}})
    assert [(await site.ask("")).status_code for _ in range(2)] == [200, 429]
    assert (await site.ask("wrong")).status_code == 401, "a wrong key is no missing key"
    assert (await site.ask("a/default")).status_code == 200


async def test_tenants_share_no_cache_unless_they_share_a_group(tenant_site: Sites) -> None:
    site = tenant_site({"a": {}, "b": {"group": "team"}, "c": {"group": "team"}, "team": {}})
    salts = {}
    for name in ("a", "b", "c", "team"):
        await site.ask(f"{name}/default")
        await site.ask(f"{name}/default", cache_salt="mine")
        salts[name] = [made.cache_salt for made in site.site.engine.requests[-2:]]
    assert salts["b"] == salts["c"]
    assert len({salts[name][0] for name in salts}) == 3
    assert all(own == f"{plain}mine" for plain, own in salts.values())


async def test_the_share_of_a_tenant_goes_to_the_engine(tenant_site: Sites) -> None:
    site = tenant_site(
        {"a": {"weight": 3, "class": "slow", "kv_share": 0.5}, "b": {}},
        classes={"standard": {"reserved": 2}, "slow": {"rank": 5, "max_wait": 9, "step_tokens": 64}},
        fairness={"quantum": 100},
    )
    await site.ask("a/default")
    await site.ask("b/default")
    slow, fast = (made.share for made in site.site.engine.requests)
    assert slow is not None and fast is not None
    assert (slow.weight, slow.rank, slow.held_back, slow.max_wait, slow.step_tokens) == (3, 5, 2, 9, 64)
    assert (slow.kv_share, slow.quantum) == (0.5, 100)
    assert (fast.weight, fast.rank, fast.held_back) == (1, 0, 0)


async def test_secrets_of_tenants_never_cross(tenant_site: Sites) -> None:
    """Interleaved requests of four tenants: each answer, salt and stored response is its sender's own."""
    names = ["a", "b", "c", "d"]
    site = tenant_site({name: {} for name in names})
    site.site.engine.output = lambda request, choice: request.prompt_ids[:4]

    async def one(number: int) -> None:
        name = names[number % 4]
        secret = [5 + number % 200, 6 + number % 199, 7 + number % 198, 8 + number % 197]
        answer = await site.ask(f"{name}/default", prompt=secret)
        assert answer.status_code == 200
        made = next(m for m in reversed(site.site.engine.requests) if m.request_id.startswith(answer.json()["id"][5:]))
        assert list(made.prompt_ids) == secret
        assert made.tenant == site.site.app.keys.holder(site.keys[f"{name}/default"].encode()).tenant  # type: ignore[union-attr]
        assert made.cache_salt.startswith(made.tenant)

    await asyncio.gather(*(one(number) for number in range(100)))
