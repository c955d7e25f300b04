"""Tiers of an engine on a GPU: pages go to the host's memory or to a disk, and come back. The GPU is a MirrorDevice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.engine.inprocess import start_thread
from penstock.engine.tier import host
from penstock.engine.tier.files import PageFiles, block_name
from penstock.engine.tier.host import HostPages, StagedFiles
from penstock.messages import EngineClient, EngineError, GenerateRequest, SamplingParams
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.runner import ModelRunner
from tests.runtime.loading.test_load_device import Memory, config
from tests.runtime.mirror_device import load_mirror

Checkpoint = Callable[..., Path]
TEXTS = 9
ROUNDS = 20  # at most; a request waits for its pages no longer than computing takes, which is short here
PAGE = bytes(range(200))
KEYS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_here(settings: EngineConfig, *, progress: bool) -> ModelRunner:
        return load_mirror(settings, Memory(), progress=progress)

    monkeypatch.setattr(load_device, "load_gpu_runner", load_here)


async def ask(client: EngineClient, text: int) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    prompt = tuple((11 * text + 7 * place * place) % 250 + 3 for place in range(100))
    sampling = SamplingParams(seed=text, max_tokens=6, temperature=float(text % 2))
    request = GenerateRequest(request_id=f"{text}-{id(prompt)}", prompt_ids=prompt, sampling=sampling)
    deltas = [delta async for delta in client.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], max(delta.cached_tokens for delta in deltas)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_texts_come_back_with_the_same_tokens(
    tiny_checkpoint: Checkpoint, mirrored: None, tmp_path: Path, tier: str
) -> None:
    settings = config(tiny_checkpoint("qwen3"))
    plain = replace(settings, device="cpu", depth=1, kv_cache_bytes=8 << 20, threads=1)
    client = await start_thread(plain)
    want = [(await ask(client, text))[0] for text in range(TEXTS)]
    await client.close()
    page = 16 * 1024  # bytes at least
    more: dict[str, Any] = {"kv_host": 64 << 20} if tier == "host" else {"kv_disk": f"{tmp_path / 'kv'},64MiB"}
    client = await start_thread(replace(settings, kv_cache_bytes=40 * page, **more))
    assert client.info.num_blocks[0] < 6 * TEXTS, "not all texts are in the GPU's memory"
    try:
        most = 0
        for number in range(ROUNDS):
            for text in range(TEXTS):
                tokens, cached = await ask(client, text)
                assert tokens == want[text]
                most = max(most, cached if number else 0)
            if client.stats().disk_reads >= 12 and most >= 48:
                break
        stats = client.stats()
        assert stats.disk_reads >= 12 and most >= 48, stats
        assert stats.disk_writes >= 12 and not stats.disk_failures
    finally:
        await client.close()


async def test_memory_that_cannot_be_pinned_is_refused_in_one_line(
    tiny_checkpoint: Checkpoint, mirrored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(runner: ModelRunner, size: int) -> memoryview:
        raise RuntimeError("CUDA error: out of memory")

    settings = config(tiny_checkpoint("qwen3"))
    with pytest.raises(EngineError, match=r"--kv-host has 16 B, and a KV block takes .*: give a larger size"):
        await start_thread(replace(settings, kv_host=16))
    monkeypatch.setattr(ModelRunner, "host_memory", refuse)
    with pytest.raises(EngineError, match=r"--kv-host is 1.00 GiB, and only 0 B could be pinned: give a smaller size"):
        await start_thread(replace(settings, kv_host=1 << 30))


class FakePage:
    """A page in memory of its own, which a test may look at."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.loading: Callable[[], object] = lambda: None  # called in `load`, before it copies

    def save(self, target: memoryview) -> None:
        target[:] = self.content

    def load(self, source: memoryview) -> None:
        self.loading()
        self.content[:] = source


def pages(count: int) -> HostPages:
    return HostPages(lambda size: memoryview(bytearray(size)), len(PAGE), count * len(PAGE) + 7)


def test_pages_of_the_host_are_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CHUNK", 450)
    kept = pages(5)
    for key in KEYS[:5]:
        assert kept.write(key, FakePage(PAGE[:-1] + key[:1]))
    assert not kept.write(KEYS[5], FakePage(PAGE)), "there is no room"
    for key in KEYS[:5]:
        page = FakePage(bytes(len(PAGE)))
        assert kept.read(key, page) > 0 and page.content == PAGE[:-1] + key[:1]
    assert kept.read(KEYS[5], FakePage()) == 0.0
    assert kept.read(KEYS[0][:8] + bytes(24), FakePage()) == 0.0 or KEYS[0][8:] == bytes(24), "the whole key counts"
    assert kept.write(KEYS[0], FakePage(PAGE)), "the same block again takes no more room"
    assert kept.remove([block_name(KEYS[1]), 12345]) and kept.write(KEYS[5], FakePage(PAGE))
    assert kept.clear() and not list(kept.scan()) and kept.read(KEYS[0], FakePage()) == 0.0
    assert all(kept.write(key, FakePage(PAGE)) for key in KEYS[:5])


def test_a_page_that_is_removed_while_it_is_read_is_not_there() -> None:
    kept, page = pages(1), FakePage(bytes(len(PAGE)))
    kept.write(KEYS[0], FakePage(PAGE))

    def displace() -> None:
        kept.remove([block_name(KEYS[0])])
        kept.write(KEYS[1], FakePage(PAGE[::-1]))

    page.loading = displace
    assert kept.read(KEYS[0], page) == 0.0
    page.loading = lambda: None
    assert kept.read(KEYS[1], page) > 0 and page.content == PAGE[::-1]


def test_files_of_a_gpus_pages_are_checked_before_they_reach_it(tmp_path: Path) -> None:
    files = StagedFiles(PageFiles(tmp_path, "gpu", len(PAGE)), lambda size: memoryview(bytearray(size)))
    page = FakePage(bytes(len(PAGE)))
    assert files.write(KEYS[0], FakePage(PAGE)) and files.read(KEYS[0], page) > 0 and page.content == PAGE
    (path,) = files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    page = FakePage(bytes(len(PAGE)))
    assert files.read(KEYS[0], page) == 0.0 and page.content == bytes(len(PAGE))
    assert not list(files.scan())
