"""Engines as pods of Kubernetes: a workload with the scale subresource, such as a Deployment, starts and ends them.

Speaks to the API server directly: seven requests of its documented REST API need no client library. Changes carry the
resource version that was read, so that of two writers one is refused and reads again.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cluster.place import PlacedEngine, PlacementError, PlaceStatus

if TYPE_CHECKING:
    import aiohttp

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod
SECONDS = 10.0  # for an answer
WATCH_SECONDS = 30  # for which the API server keeps a watch open
TRIES = 5  # to change a number that others change, too
MOST_BYTES = 32 << 20  # of an answer
KINDS = {  # of workloads with the scale subresource
    "deployment": ("apis/apps/v1", "deployments"),
    "statefulset": ("apis/apps/v1", "statefulsets"),
    "leaderworkerset": ("apis/leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
}
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"  # pods with less end first
GONE = 410  # the resource version of a watch is too old


class KubernetesApi:
    """Requests to an API server, as JSON."""

    def __init__(self, url: str = "", account: Path = ACCOUNT) -> None:
        """`url` is that of the API server, such as that of `kubectl proxy`; "": that of the cluster that this pod is
        in, with the pod's service account. Raises PlacementError outside a cluster."""
        self.namespace, self._account = "default", account
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not (url or host):
            raise PlacementError("this is no pod of a cluster: name the API server with --kubernetes-api URL")
        self._in_cluster = not url
        self._url = url.rstrip("/") or f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        if self._in_cluster:
            self.namespace = (account / "namespace").read_text().strip()
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", absent: bool = False
    ) -> dict[str, Any]:
        """Return the answer. Raises Conflict for a resource version that is no longer the last, and PlacementError for
        other errors. With `absent`, a resource that does not exist gives {}."""
        import aiohttp
        import msgspec

        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self.open(method, path, data, kind, SECONDS) as answer:
                text = await answer.content.read(MOST_BYTES)
                if answer.status == 404 and absent:
                    return {}
                if answer.status == 409:
                    raise Conflict(f"{path} was changed by another")
                if answer.status >= 300:
                    said = text.decode("utf-8", "replace")[:300]
                    raise PlacementError(f"Kubernetes answers {method} {path} with status {answer.status}: {said}")
                found = msgspec.json.decode(text)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PlacementError(f"Kubernetes at {self._url} does not answer: {error or 'too late'}") from error
        except msgspec.DecodeError as error:
            raise PlacementError(f"Kubernetes at {self._url} does not answer with JSON: {error}") from error
        return found if isinstance(found, dict) else {}

    def open(
        self, method: str, path: str, data: bytes | None, kind: str, seconds: float
    ) -> "aiohttp.client._RequestContextManager":
        """Begin a request. The token is read again, since it is renewed."""
        import ssl

        import aiohttp

        if self._session is None:
            tls = ssl.create_default_context(cafile=self._account / "ca.crt") if self._in_cluster else True
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls))
        headers = {"Content-Type": kind}
        if self._in_cluster:
            headers["Authorization"] = f"Bearer {(self._account / 'token').read_text().strip()}"
        timeout = aiohttp.ClientTimeout(total=seconds)
        return self._session.request(method, f"{self._url}/{path}", data=data, headers=headers, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Conflict(PlacementError):
    """Another has changed the resource since it was read."""


class KubernetesEngines:
    """A Placement: the pods of one workload."""

    def __init__(
        self,
        api: KubernetesApi,
        kind: str,
        name: str,
        namespace: str = "",
        *,
        load: Callable[[str], int] = lambda ip: 0,
    ) -> None:
        """`load` returns the requests of the engine at an IP address. Raises ValueError for another kind."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} cannot be scaled: give {', '.join(KINDS)}")
        self._api, self._load, self._name = api, load, name
        namespace = namespace or api.namespace
        group, plural = KINDS[kind]
        self._scale = f"{group}/namespaces/{namespace}/{plural}/{name}/scale"
        self._pods = f"api/v1/namespaces/{namespace}/pods"
        self._autoscalers = f"apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
        self._version = ""  # of the list of pods that was read last
        self._checked = False

    async def engines(self) -> Sequence[PlacedEngine]:
        if not self._checked:
            await self._refuse_second_scaler()
            self._checked = True
        found = await self._api.ask("GET", f"{self._pods}?labelSelector={await self._selector()}")
        self._version = str(found.get("metadata", {}).get("resourceVersion", ""))
        return [engine for pod in found.get("items", ()) if (engine := self._engine(pod)) is not None]

    async def ensure(self, count: int) -> None:
        """See Placement. The workload's controller ends the pods that cost least."""
        for _ in range(TRIES):
            scale = await self._api.ask("GET", self._scale)
            if int(scale.get("spec", {}).get("replicas", 0)) == count:
                return
            scale["spec"] = {"replicas": count}
            try:
                await self._api.ask("PUT", self._scale, scale)
                return
            except Conflict:
                continue
        raise PlacementError(f"{self._name} is changed by another all the time: {TRIES} tries to scale it failed")

    async def drain(self, name: str) -> None:
        """See Placement. Lets the controller end this pod first. Its preStop hook, or SIGTERM, drains the engine."""
        change = {"metadata": {"annotations": {DELETION_COST: "-1000"}}}
        await self._api.ask("PATCH", f"{self._pods}/{name}", change, kind="application/merge-patch+json", absent=True)

    async def kill(self, name: str) -> None:
        """See Placement. The controller starts another pod in its place."""
        await self._api.ask("DELETE", f"{self._pods}/{name}?gracePeriodSeconds=0", absent=True)

    async def changed(self) -> None:
        """See Placement: watches the pods from the list that was read last. A watch that breaks is a change, too, since
        the next list has what it missed."""
        import aiohttp

        if not self._version:
            await asyncio.sleep(SECONDS)
            return
        query = f"labelSelector={await self._selector()}&watch=1&resourceVersion={self._version}"
        path = f"{self._pods}?{query}&timeoutSeconds={WATCH_SECONDS}"
        try:
            async with self._api.open("GET", path, None, "application/json", WATCH_SECONDS + SECONDS) as answer:
                if answer.status != GONE:
                    await answer.content.readline()
        except (aiohttp.ClientError, OSError):
            await asyncio.sleep(1.0)

    async def _selector(self) -> str:
        from urllib.parse import quote

        scale = await self._api.ask("GET", self._scale)
        selector = scale.get("status", {}).get("selector", "")
        if not selector:
            raise PlacementError(f"{self._name} has no pod selector in its scale")
        return quote(str(selector), safe="=,()!")

    def _engine(self, pod: dict[str, Any]) -> PlacedEngine | None:
        """A pod as an engine; None if it has ended."""
        meta, state = pod["metadata"], pod.get("status", {})
        if state.get("phase") in ("Succeeded", "Failed"):
            return None
        conditions = {each["type"]: each for each in state.get("conditions", ())}
        ready = conditions.get("Ready", {})
        status: PlaceStatus = "starting"
        since = meta.get("creationTimestamp", "")
        if meta.get("deletionTimestamp"):
            status, since = "draining", meta["deletionTimestamp"]
        elif ready.get("status") == "True":
            status, since = "ready", ready.get("lastTransitionTime", since)
        return PlacedEngine(
            name=meta["name"], status=status, seconds=_age(since), requests=self._load(state.get("podIP", ""))
        )

    async def _refuse_second_scaler(self) -> None:
        """Raise PlacementError if a HorizontalPodAutoscaler changes the same number."""
        found = await self._api.ask("GET", self._autoscalers, absent=True)
        for each in found.get("items", ()):
            if each["spec"]["scaleTargetRef"]["name"] == self._name:
                raise PlacementError(
                    f"the HorizontalPodAutoscaler {each['metadata']['name']} scales {self._name}, too, and would undo "
                    "what this autoscaler does: delete one of them"
                )


def _age(moment: str) -> float:
    """Seconds since a time as Kubernetes writes it; 0 for none, and for one to come."""
    return max(time.time() - datetime.fromisoformat(moment).timestamp(), 0.0) if moment else 0.0
