"""What is found again, by whom, and what is not."""

import pytest

from penstock.messages import BlockChanges, BlockKeys, Window
from tests.schedule.simulated import Simulation, request, simulation

PROMPT = tuple(i % 37 for i in range(1024))


def cached(sim: Simulation, name: str, prompt: tuple[int, ...], **fields: object) -> int:
    """Run a request to its end and say how much of its prompt it did not compute."""
    sim.add(request(name, prompt, 2, **fields))
    sim.run()
    sim.check_drained()
    final = sim.outputs[name, 0].final
    assert final is not None
    return final.cached_tokens


def large(**fields: object) -> Simulation:
    return simulation(blocks=257, block_size=16, max_model_len=2048, max_num_batched_tokens=512, **fields)


def test_a_shared_prefix_is_found_for_the_same_salt_only() -> None:
    sim = large()
    assert cached(sim, "a", (*PROMPT, 1, 2, 3), cache_salt="red") == 0
    assert cached(sim, "b", (*PROMPT, 4, 5, 6), cache_salt="red") == 1024
    assert cached(sim, "c", (*PROMPT, 4, 5, 6), cache_salt="blue") == 0
    assert cached(sim, "d", (*PROMPT, 4, 5, 6), cache_salt="blue") == 1024
    for name in "abcd":
        sim.check_output(name)


def test_the_salt_separates() -> None:
    sim = simulation()
    prompt = PROMPT[:17]
    cached(sim, "a", prompt)
    assert cached(sim, "b", prompt, cache_salt="x") == 0
    assert cached(sim, "c", prompt, cache_salt="x") == 16


def test_fields_do_not_run_into_each_other() -> None:
    assert BlockKeys(4, "xy").root("z") != BlockKeys(4, "x").root("yz")


def test_other_weights_and_block_sizes_have_other_keys() -> None:
    made = [(4, "a", "s"), (4, "a", "t"), (4, "b", "s"), (8, "a", "s")]
    assert len({BlockKeys(size, weights).root(salt) for size, weights, salt in made}) == 4


def test_a_front_computes_the_keys_that_an_engine_stores() -> None:
    sim = simulation()
    sim.scheduler.watch_blocks()
    cached(sim, "a", PROMPT[:17], cache_salt="s")
    front = BlockKeys(4, "simulated")
    keys: list[bytes] = []
    front.extend(keys, front.root("s"), PROMPT, 4)
    report = sim.scheduler.block_changes()
    assert report is not None and report.number == 1 and report.stored[:4] == tuple(keys)


@pytest.mark.parametrize("length", [1, 4, 5, 16, 17])
def test_a_hit_on_the_whole_prompt_still_computes_its_last_token(length: int) -> None:
    sim = simulation()
    prompt = PROMPT[:length]
    cached(sim, "a", prompt)
    hit = cached(sim, "b", prompt)
    whole_blocks = length // 4 * 4
    assert hit == min(whole_blocks, length - 1)
    # Where the last token lies in a cached block, that block is copied before it is written.
    assert bool([copy for plan in sim.plans for copy in plan.copies]) == (length % 4 == 0)
    sim.check_output("b")


def test_output_is_found_as_well() -> None:
    """The next turn of a conversation brings the last one's answer."""
    sim = simulation()
    sim.add(request("a", 9, 9))
    sim.run()
    turn = (*sim.requests["a"].prompt_ids, *sim.outputs["a", 0].token_ids)
    assert cached(sim, "b", (*turn, 1, 2, 3)) == 16  # of 17 computed: the last token's KV never was


def test_what_is_not_yet_computed_is_not_found() -> None:
    """Blocks are published when their result is applied, not when they are planned."""
    sim = simulation(depth=2)
    first = request("a", 24, 2)
    sim.add(first)
    sim.plan()
    sim.add(request("b", first.prompt_ids, 2))
    plan = sim.plan()
    assert plan is not None
    assert [new.num_computed for new in plan.new] == [0]
    sim.run()
    sim.check_output("b")


def test_without_caching_nothing_is_found() -> None:
    sim = simulation(enable_prefix_caching=False)
    cached(sim, "a", PROMPT[:17])
    assert cached(sim, "b", PROMPT[:17]) == 0
    assert sim.scheduler.stats().blocks_cached == (0,)
    assert sim.scheduler.stats().prefix_queries == 0


def test_reset() -> None:
    sim = simulation()
    cached(sim, "a", PROMPT[:17])
    sim.add(request("b", 9, 9))
    sim.step()
    sim.scheduler.reset_prefix_cache()
    sim.run()
    sim.check_output("b")
    assert cached(sim, "c", PROMPT[:17]) == 0


def test_stats_count_prompt_tokens() -> None:
    sim = simulation()
    cached(sim, "a", PROMPT[:17])
    cached(sim, "b", PROMPT[:17])
    stats = sim.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (34, 16)


def test_a_hit_that_leaves_no_block_for_the_copy() -> None:
    """The pool holds the request and nothing more: its last block is computed anew instead of copied."""
    sim = simulation(blocks=5)
    prompt = PROMPT[:16]
    for name in ("a", "b"):
        sim.add(request(name, prompt, 1))
        sim.run()
        sim.check_output(name)
    assert sim.plans[1].new[0].num_computed == 12
    assert not sim.plans[1].copies


@pytest.mark.parametrize(("salt", "hit"), [("red", 8), ("blue", 0)])
def test_output_after_a_prompt_shorter_than_a_block(salt: str, hit: int) -> None:
    sim = simulation()
    sim.add(request("a", 3, 7, cache_salt="red"))
    sim.run()
    turn = (*sim.requests["a"].prompt_ids, *sim.outputs["a", 0].token_ids)
    assert cached(sim, "b", turn, cache_salt=salt) == hit


def test_old_prefixes_make_room_for_new_ones() -> None:
    sim = simulation(blocks=13)
    for i in range(8):
        cached(sim, f"r{i}", tuple(100 + i for _ in range(20)))
    assert cached(sim, "again", tuple(107 for _ in range(20))) == 19
    assert cached(sim, "long ago", tuple(100 for _ in range(20))) == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    sim = simulation(blocks=9)
    cached(sim, "a", PROMPT[:24])
    cached(sim, "b", tuple(99 for _ in range(16)))
    hit = cached(sim, "c", PROMPT[:25])
    assert 0 < hit < 24


class TestWindows:
    def test_only_the_windows_blocks_are_needed(self) -> None:
        """Whoever follows a long prompt finds it although the window's first blocks are long evicted."""
        sim = simulation(blocks=(33, 9), windows=(0, 8))
        cached(sim, "a", PROMPT[:40])
        cached(sim, "b", tuple(99 for _ in range(20)))  # takes the window group's free blocks
        assert cached(sim, "c", (*PROMPT[:40], 7)) == 40
        for name in "abc":
            sim.check_output(name)

    def test_the_match_is_valid_for_every_group(self) -> None:
        """The window's last blocks are gone: the match ends where an earlier window is whole, or nowhere."""
        sim = simulation(blocks=(65, 7), windows=(0, 8), max_num_batched_tokens=8)
        cached(sim, "a", PROMPT[:40])
        cached(sim, "b", tuple(99 for _ in range(40)))
        hit = cached(sim, "c", (*PROMPT[:40], 7))
        assert hit == 0
        sim.check_output("c")

    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 11])
    def test_every_prefix_length(self, window: int, chunked: bool) -> None:
        sim = simulation(windows=(Window(window, chunked), 0), blocks=65)
        cached(sim, "a", PROMPT[:30])
        for length in range(1, 30):
            assert cached(sim, f"p{length}", PROMPT[:length]) >= min(length // 4 * 4, length - 1)
            sim.check_output(f"p{length}")

    def test_dead_blocks_are_freed_as_the_window_passes(self) -> None:
        sim = simulation(windows=(0, 8), blocks=65, enable_prefix_caching=False)
        sim.add(request("a", 4, 50))
        held = []
        while sim.scheduler.has_work:
            sim.step()
            held.append(sim.scheduler.stats().blocks_held)
        sim.check_output("a")
        assert max(full for full, _ in held) == 13
        assert max(window for _, window in held) == 3  # ceil(7 / 4) + 1

    def test_a_long_prompt_passes_through_a_small_window_pool(self) -> None:
        sim = simulation(windows=(8,), blocks=4, max_num_batched_tokens=64)
        sim.add(request("a", 60, 4))
        sim.run()
        sim.check_output("a")
        sim.check_drained()


def test_hashing_is_done_once_per_block() -> None:
    sim = simulation()
    calls: list[int] = []
    keys = sim.scheduler._cache.keys
    extend = keys.extend

    def counting(keys: list[bytes], root: bytes, tokens: list[int], count: int) -> None:
        before = len(keys)
        extend(keys, root, tokens, count)
        calls.append(len(keys) - before)

    keys.extend = counting  # type: ignore[method-assign]
    sim.add(request("a", 16, 16))
    sim.run()
    assert sum(calls) == 7  # of 31 computed tokens
    assert len(calls) == 5  # admission, which knows 4 blocks, their publication, and one for each block decoded


def test_reports_say_what_the_cache_holds() -> None:
    """A mirror that applies every report has the keys of the blocks that can be matched, also after evictions."""
    sim = simulation(blocks=17)
    scheduler, mirror, number = sim.scheduler, set[bytes](), 0
    removed = 0
    for index in range(40):
        if index == 10:
            scheduler.watch_blocks()
        cached(sim, str(index), tuple((index % 7 * 31 + i) % 37 for i in range(5 + index % 13 * 3)))
        if (report := scheduler.block_changes()) is not None:
            assert index >= 10 and report.number == number + 1
            number, removed = report.number, removed + len(report.removed)
            mirror = (mirror | set(report.stored)) - set(report.removed)
        if index >= 10:
            assert mirror == set(scheduler._cache.pools[0]._index)
    scheduler.reset_prefix_cache()
    report = scheduler.block_changes()
    assert report is not None and set(report.removed) == mirror and not report.stored and removed > 20
    scheduler.watch_blocks()  # a reader that came later, or missed something
    assert scheduler.block_changes() == BlockChanges(1)


def test_a_group_that_keeps_whole_prefixes_is_reported() -> None:
    sim = simulation(blocks=(65, 65), windows=(4, 0))
    sim.scheduler.watch_blocks()
    cached(sim, "a", PROMPT[:33])
    report = sim.scheduler.block_changes()
    assert report is not None and len(report.stored) == 8


def test_an_empty_cache_that_nobody_watches_reports_nothing() -> None:
    sim = simulation()
    cached(sim, "a", PROMPT[:17])
    assert sim.scheduler.block_changes() is None
