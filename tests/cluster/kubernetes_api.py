"""A stand-in for the API server of Kubernetes: a Deployment with its pods, resource versions, conflicts and watches.

It keeps the rules that a client can rely on: a PUT with an old resource version is refused with 409, a watch begins
after a resource version, one that is too old is refused with 410, and a watch may end at any time. Its controller
starts and ends pods some time after the scale has changed, those with the lowest deletion cost first.
"""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
SELECTOR = {"app": "engines"}


class StandIn:
    """A namespace with one Deployment."""

    def __init__(self, replicas: int = 0, ready_after: float = 0.05) -> None:
        self.url = ""
        self.replicas = replicas
        self.pods: dict[str, dict[str, Any]] = {}
        self.autoscalers: list[dict[str, Any]] = []
        self.version = 100
        self.scale_version = 100  # the resource version of the scale
        self.oldest = 0  # resource versions before this one are forgotten
        self.conflicts = 0  # refusals so far
        self.conflict_next = 0  # writes by another that come just before the next PUTs
        self.cut_watches = False  # end each watch at once
        self.failing = False  # answer everything with 500
        self.asked: list[tuple[str, str]] = []
        self._ready_after = ready_after
        self._made = 0
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "StandIn":
        app = web.Application(middlewares=[self._observe])
        apps, core = "/apis/apps/v1/namespaces/{ns}/deployments/engines/scale", "/api/v1/namespaces/{ns}/pods"
        app.router.add_get(apps, self._get_scale)
        app.router.add_put(apps, self._put_scale)
        app.router.add_get(core, self._list_pods)
        app.router.add_patch(core + "/{name}", self._patch_pod)
        app.router.add_delete(core + "/{name}", self._delete_pod)
        app.router.add_get("/apis/autoscaling/v2/namespaces/{ns}/horizontalpodautoscalers", self._list_autoscalers)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await self._control()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._runner is not None
        await self._runner.cleanup()

    # -- what happens in the cluster ------------------------------------------------------------------------------

    async def lose(self, name: str) -> None:
        """A pod disappears with its node."""
        await self._record("DELETED", self.pods.pop(name))
        await self._control()

    async def _control(self) -> None:
        """What the controllers of Deployment and ReplicaSet do."""
        staying = [pod for pod in self.pods.values() if "deletionTimestamp" not in pod["metadata"]]
        for _ in range(self.replicas - len(staying)):
            await self._start_pod()
        cost = lambda pod: int(pod["metadata"].get("annotations", {}).get(DELETION_COST, 0))  # noqa: E731
        unready_first = lambda pod: (_is_ready(pod), cost(pod))  # noqa: E731
        for pod in sorted(staying, key=unready_first)[: max(len(staying) - self.replicas, 0)]:
            await self._end_pod(pod["metadata"]["name"])

    async def _start_pod(self) -> None:
        self._made += 1
        name = f"engines-{self._made}"
        self.pods[name] = {
            "metadata": {"name": name, "labels": SELECTOR, "creationTimestamp": _now()},
            "status": {"phase": "Pending", "podIP": f"10.0.0.{self._made}", "conditions": []},
        }
        await self._record("ADDED", self.pods[name])

        async def become_ready() -> None:
            await asyncio.sleep(self._ready_after)
            if (pod := self.pods.get(name)) is not None:
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
                pod["status"].update(phase="Running", conditions=[ready])
                await self._record("MODIFIED", pod)

        self._later(become_ready())

    async def _end_pod(self, name: str) -> None:
        self.pods[name]["metadata"]["deletionTimestamp"] = _now(30)
        await self._record("MODIFIED", self.pods[name])

        async def be_gone() -> None:
            await asyncio.sleep(self._ready_after)
            if (pod := self.pods.pop(name, None)) is not None:
                await self._record("DELETED", pod)

        self._later(be_gone())

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _record(self, kind: str, pod: dict[str, Any]) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._events.append((self.version, kind, json.loads(json.dumps(pod))))
        async with self._changed:
            self._changed.notify_all()

    # -- requests -------------------------------------------------------------------------------------------------

    @web.middleware
    async def _observe(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append((request.method, request.path_qs))
        if self.failing:
            return _status(500, "etcdserver: leader changed")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _get_scale(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": "engines", "resourceVersion": str(self.scale_version)},
                "spec": {"replicas": self.replicas},
                "status": {"replicas": len(self.pods), "selector": "app=engines"},
            }
        )

    async def _put_scale(self, request: web.Request) -> web.Response:
        if self.conflict_next:  # another controller was quicker
            self.conflict_next -= 1
            self.scale_version += 1
        scale = await request.json()
        if scale["metadata"]["resourceVersion"] != str(self.scale_version):
            self.conflicts += 1
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        self.replicas = int(scale["spec"]["replicas"])
        self.scale_version += 1
        await self._control()
        return await self._get_scale(request)

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "app=engines"
        if "watch" in request.query:
            return await self._watch(request)
        listed = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.pods.values())}
        return web.json_response(listed)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.oldest:
            return _status(410, "too old resource version")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        while not self.cut_watches:
            for version, kind, pod in self._events:
                if version > since:
                    since = version
                    await answer.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
            async with self._changed:
                await self._changed.wait()
        return answer

    async def _patch_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "pods not found")
        assert request.content_type == "application/merge-patch+json"
        change = await request.json()
        pod["metadata"].setdefault("annotations", {}).update(change["metadata"]["annotations"])
        await self._record("MODIFIED", pod)
        return web.json_response(pod)

    async def _delete_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return _status(404, "pods not found")
        pod = self.pods[name]
        await self.lose(name)
        return web.json_response(pod)

    async def _list_autoscalers(self, request: web.Request) -> web.Response:
        return web.json_response({"items": self.autoscalers})


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def _now(ahead: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=ahead)).strftime("%Y-%m-%dT%H:%M:%SZ")
