"""--kv-disk: its value, and what it does not go with."""

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import ConfigError, ModelFacts
from penstock.config.facts import PoolingFacts
from penstock.config.kv_disk import DAYS, KVDisk, read_kv_disk
from tests.config.models import FULL, MIXED, WINDOWED
from tests.config.test_gpu import on
from tests.config.test_resolve import resolve

DISK = "/var/cache/kv,100GiB"


def test_its_value() -> None:
    assert read_kv_disk(DISK) == KVDisk("/var/cache/kv", 100 << 30, DAYS)
    assert read_kv_disk("kv,1.5GB,0.5") == KVDisk("kv", 1_500_000_000, 0.5)
    assert resolve(WINDOWED, kv_disk=DISK).engine.kv_disk == DISK


@pytest.mark.parametrize(
    "text", ["", "kv", "kv,", ",1GiB", "kv,0", "kv,1GiB,0", "kv,1GiB,nan", "kv,1GiB,1,2", "a,b,1GiB"]
)
def test_any_other_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a folder without a comma, a size"):
        read_kv_disk(text)


@pytest.mark.parametrize(
    ("facts", "flags", "words"),
    [
        (MIXED, {}, "windows of different sizes: leave it out"),
        (replace(FULL, pooling=PoolingFacts(task="embed", mode="last", width=8, encoder=False)), {}, "gives vectors"),
        (FULL, {"tensor_parallel_size": 2}, "in one process: leave it out"),
        (FULL, {"enable_prefix_caching": False}, "--enable-prefix-caching (command line) is off"),
        (FULL, {"replicas": "2"}, "does not go with"),
    ],
)
def test_what_it_does_not_go_with_is_named(facts: ModelFacts, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(facts, kv_disk=DISK, **flags)
    assert words in str(refused.value) and "--kv-disk" in str(refused.value)


def test_a_gpu_has_a_disk_or_the_memory_of_its_host() -> None:
    assert on(kv_disk=DISK).engine.kv_disk == DISK and on(kv_host="2GiB").engine.kv_host == 2 << 30
    with pytest.raises(ConfigError, match=r"--kv-host is set, too, .*: leave one of the two out"):
        on(kv_disk=DISK, kv_host="2GiB")
    with pytest.raises(ConfigError, match=r"--kv-host \(command line\) is .*: raise --kv-cache-memory instead"):
        resolve(FULL, kv_host="2GiB")
    with pytest.raises(ConfigError, match=r"--prefill-replicas \(command line\) is .*: set --device cpu, or leave"):
        on(replicas="2", prefill_replicas=1)


def test_replicas_for_prompts_need_others_that_decode() -> None:
    assert resolve(FULL, replicas="3", prefill_replicas=1).server.prefill_replicas == 1
    for replicas in ("1", "2", "1:4"):
        with pytest.raises(ConfigError, match="set --replicas to a number above 2"):
            resolve(FULL, replicas=replicas, prefill_replicas=2)
    with pytest.raises(ConfigError, match=r"--prefill-replicas.*windows of different sizes"):
        resolve(MIXED, replicas="2", prefill_replicas=1)
