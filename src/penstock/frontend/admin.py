"""The operator's routes: reload, sleep, wake and the prefix cache. All but /reload have vLLM's names."""

import asyncio
from typing import Protocol
from urllib.parse import parse_qs

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import request_info
from penstock.frontend.http.keys import Keys
from penstock.frontend.registry import ModelRegistry
from penstock.messages import ResetCache

_SWITCH = {"": True, "1": True, "true": True, "0": False, "false": False}


class Reloading(Protocol):
    """This process's reloads, or those of all API processes."""

    async def reload(self, *, drain_first: bool = False) -> str: ...


class AdminRoutes:
    """Routes of the operator, who has been recognised by `Access`."""

    def __init__(self, models: ModelRegistry, reloading: Reloading | None, keys: Keys | None = None) -> None:
        """They are about the default model. `reloading` reloads it in all API processes; None: there is only this one.
        `keys` are read again with the model; None: `reloading` does that."""
        self._models, self._reloading, self._keys = models, reloading, keys

    def routes(self) -> list[Route]:
        return [
            Route("/reload", self._reload, methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            Route("/reset_prefix_cache", self._reset_cache, methods=["POST"]),
        ]

    async def _reload(self, request: Request) -> Response:
        _check_admin(request)
        if self._keys is not None:
            await asyncio.to_thread(self._keys.reload)
        reloading = self._models.default.reloads if self._reloading is None else self._reloading
        return _json({"message": await reloading.reload(drain_first=_switch(request, "drain_first"))})

    async def _sleep(self, request: Request) -> Response:
        _check_admin(request)
        await self._models.default.sleep()
        return _json({"is_sleeping": self._models.default.asleep})

    async def _wake(self, request: Request) -> Response:
        _check_admin(request)
        await self._models.default.wake()
        return _json({"is_sleeping": self._models.default.asleep})

    async def _is_sleeping(self, request: Request) -> Response:
        _check_admin(request)
        return _json({"is_sleeping": self._models.default.asleep})

    async def _reset_cache(self, request: Request) -> Response:
        _check_admin(request)
        model = self._models.default
        await model.wake()  # an engine that sleeps may have a disk tier
        await model.model.client.control(ResetCache())
        return _json({"reset": True})


def _check_admin(request: Request) -> None:
    """Raises APIError 403 for a path that is only decoded one of these: it was admitted as another one."""
    if not request_info(request.scope).admin:
        raise APIError(403, f"write the path as {request.url.path}, without % signs", code="admin_key_required")


def _switch(request: Request, name: str) -> bool:
    """A parameter of the query that is true or false; false if it is not there."""
    values = parse_qs(request.url.query[:1024], keep_blank_values=True).get(name, ["false"])
    if values[-1].lower() not in _SWITCH:
        raise invalid(f"{name} is {values[-1][:40]!r}; give true or false", name)
    return _SWITCH[values[-1].lower()]


def _json(fields: dict[str, object]) -> Response:
    return Response(orjson.dumps(fields), media_type="application/json")
