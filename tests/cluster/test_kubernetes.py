"""The reconciler with Kubernetes, against a stand-in for its API server."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cluster.kubernetes import KubernetesApi, KubernetesEngines
from penstock.cluster.place import PlacementError, reconcile
from tests.cli.uses.right_uses import SCALED
from tests.cluster.kubernetes_api import StandIn
from tests.patience import PATIENCE, until


@pytest.fixture
async def cluster() -> AsyncIterator[StandIn]:
    async with StandIn() as stand_in:
        yield stand_in


@pytest.fixture
async def engines(cluster: StandIn) -> AsyncIterator[KubernetesEngines]:
    api = KubernetesApi(cluster.url)
    busy = {"10.0.0.1": 5, "10.0.0.2": 0, "10.0.0.3": 7}
    yield KubernetesEngines(api, "deployment", "engines", load=lambda ip: busy.get(ip, 1))
    await api.close()


async def scaled(engines: KubernetesEngines, wanted: int) -> None:
    await reconcile(engines, await engines.engines(), wanted)


async def until_ready(cluster: StandIn, count: int) -> None:
    await until(
        lambda: sum(pod["status"]["phase"] == "Running" for pod in cluster.pods.values()) == count == len(cluster.pods),
        f"{count} pods",
    )


async def test_up_down_and_to_zero(cluster: StandIn, engines: KubernetesEngines) -> None:
    await scaled(engines, 3)
    assert {one.status for one in await engines.engines()} == {"starting"}
    await until_ready(cluster, 3)
    assert [(one.name, one.status, one.requests) for one in await engines.engines()] == [
        ("engines-1", "ready", 5),
        ("engines-2", "ready", 0),
        ("engines-3", "ready", 7),
    ]
    await scaled(engines, 2)
    assert {one.name: one.status for one in await engines.engines()}["engines-2"] == "draining", "it has no requests"
    await until_ready(cluster, 2)
    await scaled(engines, 0)
    await until_ready(cluster, 0)


async def test_a_second_order_changes_nothing(cluster: StandIn, engines: KubernetesEngines) -> None:
    await scaled(engines, 2)
    await until_ready(cluster, 2)
    asked = len(cluster.asked)
    await scaled(engines, 2)
    assert {method for method, _ in cluster.asked[asked:]} == {"GET"}


async def test_a_conflict_is_read_again(cluster: StandIn, engines: KubernetesEngines) -> None:
    cluster.conflict_next = 3
    await scaled(engines, 2)
    assert cluster.replicas == 2 and cluster.conflicts == 3
    cluster.conflict_next = 100
    with pytest.raises(PlacementError, match="5 tries to scale it failed"):
        await scaled(engines, 4)


async def test_a_lost_pod_is_replaced_and_a_late_one_ended(
    cluster: StandIn, engines: KubernetesEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scaled(engines, 2)
    await until_ready(cluster, 2)
    await cluster.lose("engines-1")
    await scaled(engines, 2)
    await until_ready(cluster, 2)
    assert set(cluster.pods) == {"engines-2", "engines-3"}
    cluster._ready_after = 1000.0
    await scaled(engines, 3)
    monkeypatch.setattr("penstock.cluster.place.START_SECONDS", -1.0)
    await scaled(engines, 3)
    assert "engines-4" not in cluster.pods and "engines-5" in cluster.pods


async def test_changes_are_seen_and_broken_watches_too(cluster: StandIn, engines: KubernetesEngines) -> None:
    await engines.engines()
    waiting = asyncio.create_task(engines.changed())
    await until(lambda: any("watch" in path for _, path in cluster.asked), "the watch")
    assert not waiting.done()
    cluster.replicas = 1
    await cluster._control()
    async with asyncio.timeout(PATIENCE):
        await waiting
        cluster.cut_watches = True
        await engines.changed()
        cluster.oldest = cluster.version + 1
        await engines.changed()
    assert len(await engines.engines()) == 1


async def test_an_api_server_that_fails_is_an_error_with_its_words(
    cluster: StandIn, engines: KubernetesEngines
) -> None:
    cluster.failing = True
    with pytest.raises(PlacementError, match=r"status 500: .*leader changed"):
        await engines.engines()
    gone = KubernetesApi("http://127.0.0.1:1")
    with pytest.raises(PlacementError, match="does not answer"):
        await KubernetesEngines(gone, "deployment", "engines").engines()
    await gone.close()


async def test_two_autoscalers_are_refused(cluster: StandIn, engines: KubernetesEngines) -> None:
    target = {"kind": "Deployment", "name": "engines"}
    cluster.autoscalers = [{"metadata": {"name": "by-queue"}, "spec": {"scaleTargetRef": target}}]
    with pytest.raises(PlacementError, match="by-queue scales engines, too"):
        await scaled(engines, 3)
    assert cluster.replicas == 0


async def test_the_command_scales_until_it_is_ended(cluster: StandIn) -> None:
    words = SCALED.format(api=cluster.url).split()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock", *words)
    try:
        await until(lambda: cluster.replicas == 2, "two engines to be ordered")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_pod_reads_its_account_again(cluster: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PlacementError, match="--kubernetes-api"):
        KubernetesApi()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (tmp_path / "namespace").write_text("models\n")
    assert KubernetesApi(account=tmp_path).namespace == "models"
    with pytest.raises(ValueError, match="'job' cannot be scaled: give deployment"):
        KubernetesEngines(KubernetesApi(cluster.url), "job", "engines")
