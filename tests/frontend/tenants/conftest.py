"""A server with a tenants file, over the scripted engine."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.tenants.keys import new_key
from tests.frontend.conftest import NAME, Site

ASK = {"model": NAME, "prompt": "hello", "max_tokens": 4}  # 1 token of prompt or more, see `TenantSite.tokens`


class TenantSite:
    """The site, its keys by tenant and key name, and its files."""

    def __init__(self, make: Callable[..., Site], folder: Path, tenants: dict[str, Any], **config: Any) -> None:
        self.folder, self.file = folder, folder / "tenants.yaml"
        self.keys: dict[str, str] = {}
        self.write(tenants)
        self.site = make(tenants=str(self.file), **{"state_dir": str(folder / "state"), **config})
        self.http = self.site.http

    def write(self, content: dict[str, Any]) -> None:
        """Writes the tenants file. A tenant without keys gets one, "default"; keys are {name: fields}."""
        content = json.loads(json.dumps(content))
        for name, tenant in content.get("tenants", {}).items():
            made = []
            for key_name, fields in tenant.pop("keys", {"default": {}}).items():
                whole = f"{name}/{key_name}"
                if whole not in self.keys or "renew" in fields:
                    fields.pop("renew", None)
                    key, key_id, stored = new_key()
                    self.keys[whole] = key
                    self._stored = getattr(self, "_stored", {}) | {whole: (key_id, stored)}
                key_id, stored = self._stored[whole]
                made.append({"name": key_name, "id": key_id, "hash": stored, **fields})
            tenant["keys"] = made
        text = json.dumps(content)
        for name in ("expires", "since"):  # days are not quoted in YAML
            parts = text.split(f'"{name}": "')
            text = parts[0] + "".join(f'"{name}": {part[:10]}{part[11:]}' for part in parts[1:])
        self.file.write_text(text)

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}

    async def ask(self, key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """`key` is TENANT/NAME, another text that is sent as it is, or "" for none."""
        return await self.http.post(path, json={**ASK, **fields}, headers=self.headers(key))

    async def close(self) -> None:
        """Settles and writes everything."""
        assert self.site.app.office is not None
        await self.site.app.office.close()


@pytest.fixture
async def tenant_site(make_site: Callable[..., Site], tmp_path: Path) -> AsyncIterator[Callable[..., TenantSite]]:
    """tenant_site(tenants={}, more of the file, config={}, make={})"""
    made: list[TenantSite] = []

    def make(tenants: dict[str, Any], *, config: dict[str, Any] | None = None, **more: Any) -> TenantSite:
        made.append(TenantSite(make_site, tmp_path, {"tenants": tenants, **more}, **(config or {})))
        return made[-1]

    yield make
    for each in made:
        await each.close()
