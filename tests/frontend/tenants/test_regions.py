"""Tenants whose requests stay in regions: what reaches the engine, and what is refused."""

from collections.abc import Callable

from tests.frontend.tenants.conftest import TenantSite

Sites = Callable[..., TenantSite]


async def test_requests_carry_the_regions_of_their_tenant(tenant_site: Sites) -> None:
    site = tenant_site({"bound": {"regions": ["eu", "ch"]}, "free": {}}, config={"region": "eu"})
    for key in ("bound/default", "free/default"):
        assert (await site.ask(key)).status_code == 200
    assert [request.regions for request in site.site.engine.requests] == [("eu", "ch"), ()]


async def test_a_server_elsewhere_refuses_a_bound_tenant_on_every_route(tenant_site: Sites) -> None:
    """It would have seen the text, and may have stored it."""
    for region, said in (("us", "is in region us"), ("", "has no --region")):
        site = tenant_site({"bound": {"regions": ["eu"]}, "free": {}}, config={"region": region})
        for path in ("/v1/completions", "/v1/files", "/v1/responses"):
            answer = await site.ask("bound/default", path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (403, "region_not_allowed"), path
            assert error["message"] == (
                f"this server {said}, and the tenant's requests stay in eu; use a server and models there"
            )
        assert (await site.ask("free/default")).status_code == 200
        assert len(site.site.engine.requests) == 1
