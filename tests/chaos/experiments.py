"""The experiments: what each does to a server, and what must hold.

Where a test of the suite is the experiment, its node ids are here. `slow` ones take more than a minute.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from tests.chaos import engine_faults, fuzz, machine, network, schemas, soak
from tests.chaos.running import run_benchmark, run_tests

Run = Callable[..., Awaitable[dict[str, Any]]]  # of a folder for logs and outputs
FRONTEND, ENGINE, E2E, SCHEDULE = "tests/frontend/", "tests/engine/", "tests/e2e/", "tests/schedule/"
BOUNDS, LOOP = FRONTEND + "test_bounds.py::", FRONTEND + "test_free_loop.py::"


class Experiment(NamedTuple):
    """An experiment: its number, what it does and what must hold, and the function that returns its figures or
    raises."""

    number: str
    what: str
    run: Run


def _tests(number: str, what: str, *names: str, **variables: str) -> Experiment:
    return Experiment(number, what, partial(run_tests, names, variables))


def _all_passed(figures: dict[str, Any]) -> bool:
    passed, _, count = figures["passed"].partition("/")
    return bool(passed == count)


def _sheds_load(figures: dict[str, Any]) -> bool:
    return bool(
        figures["refusal_ms_p99"] <= 50 and figures["share_of_peak"] >= 0.9 and figures["resident_growth"] <= 0.05
    )


def _survival(number: str, what: str, fault: str) -> Experiment:
    flags = ("--trials", "2", "--faults", fault, "--flags", "--max-num-seqs 64 --threads 1 --kv-cache-memory 512MiB")
    return Experiment(number, what, partial(run_benchmark, "survival.py", flags, fault, _all_passed))


DRILLS = (
    _tests(
        "F1",
        "bodies that cost more than their bytes: the event loop stays free",
        LOOP + "test_no_body_holds_the_loop",
        LOOP + "test_no_accepted_body_holds_the_loop",
        LOOP + "test_no_vectors_hold_the_loop",
    ),
    _tests(
        "F2",
        "answers much larger than their requests, and answers that nobody reads: refused before admission",
        BOUNDS + "test_answers_are_bounded",
        BOUNDS + "test_unread_answers_have_one_budget",
    ),
    _tests(
        "F3",
        "bodies that never end: one budget, and memory given back within 5 s",
        BOUNDS + "test_bodies_have_one_budget",
        BOUNDS + "test_memory_of_bodies_is_given_back",
    ),
    _tests("F5", "standard error that nobody reads: nothing stops", E2E + "processes/test_unread_log.py"),
    _tests(
        "F6",
        "twelve clients of the highest priority: one of the lowest is answered",
        E2E + "test_queue.py",
        SCHEDULE + "test_starvation.py",
    ),
    _tests("F7", "pages of other sites: refused", BOUNDS + "test_pages_of_other_sites_are_refused"),
    _tests("F8", "files that no model has: one line", "tests/cli/given/test_hostile_files.py"),
    _tests(
        "F9", "an engine that dies or hangs: replaced", ENGINE + "test_recovery.py", E2E + "processes/test_death.py"
    ),
    _tests(
        "F10",
        "framing and JSON that can be read in two ways: refused by name",
        BOUNDS + "test_doubtful_framing_ends_the_connection",
        BOUNDS + "test_the_error_names_it",
        BOUNDS + "test_a_refused_body_is_not_read",
    ),
)

EXPERIMENTS = (
    *DRILLS,
    _survival("1", "SIGKILL of the engine under 50 streams of SmolLM2: each goes on, token for token", "SIGKILL"),
    _survival("2", "SIGSTOP of the engine under 50 streams of SmolLM2: the same", "SIGSTOP"),
    _tests(
        "3",
        "a rank that stalls or dies: named, replaced",
        ENGINE + "ranks/test_ranks.py",
        E2E + "processes/test_ranks.py",
    ),
    Experiment("4", "saturation: no false restart", partial(engine_faults.saturation, seconds=60.0)),
    Experiment("6", "a prompt that crashes the engine, 100 times: two engines at most", engine_faults.poison),
    Experiment("7", "resets while queued, prefilled and decoded: all given back", network.resets),
    Experiment("8", "10,000 disconnects with preemption: the same", partial(network.disconnects, count=10_000)),
    Experiment("9", "200 readers at a byte a second: others are not slower", network.slow_readers),
    _tests(
        "10",
        "slow headers and bodies: closed at the timeout",
        FRONTEND + "http/test_connections.py::test_slow_headers_end_the_connection",
        FRONTEND + "http/test_connections.py::test_a_slow_body_gets_an_answer_and_the_connection_ends",
        FRONTEND + "http/test_connections.py::test_a_client_that_does_not_read_is_cut_off",
    ),
    Experiment("11", "1 GB, a million chunks, a gzip bomb: refused within 50 MB", network.large_bodies),
    Experiment(
        "12",
        "ten times the load that fits: refused at once, and the rest is answered",
        partial(
            run_benchmark, "overload.py", ("--seconds", "12", "--overload-seconds", "60"), "ten times", _sheds_load
        ),
    ),
    _tests(
        "14",
        "SIGTERM under load: what is in flight finishes",
        E2E + "processes/test_signals.py",
        E2E + "processes/test_death.py::test_sigterm_lets_what_is_in_flight_finish",
    ),
    _tests("15", "reload under load: no failure, one version a stream", E2E + "test_reload.py"),
    Experiment("16", "a KV pool of 1.2 times the longest request: the same texts", engine_faults.small_pool),
    Experiment("17", "failed allocations in random steps: one request fails each time", engine_faults.no_memory),
    Experiment("17a", "exceptions, exits, crashes in random steps: all streams go on", engine_faults.faults_at_steps),
    Experiment("17b", "a step that never ends: the engine is replaced", engine_faults.stall),
    Experiment("18", "a row that is not finite: it fails alone and is not cached", engine_faults.not_finite),
    Experiment("19", "a tokenizer that panics: that request fails", engine_faults.tokenizer),
    Experiment("20", "the wall clock jumps by an hour: timeouts stay", machine.wall_clock),
    Experiment("21", "a full disk: a batch ends with one line, inference goes on", machine.full_disk),
    Experiment("22", "no file descriptors left: it recovers", network.descriptors),
    _tests("23", "kill -9 in the middle of a batch: each request once", "tests/cli/test_batch.py"),
    _tests(
        "24",
        "any order of the scheduler's events: reference counts are the model's",
        SCHEDULE + "test_any_order.py",
        SCHEDULE + "test_block_pool.py",
        PENSTOCK_TEST_EXAMPLES="1000",
    ),
    _tests(
        "25", "every route with no key, a wrong one, and odd paths: none is reached", FRONTEND + "http/test_access.py"
    ),
    Experiment(
        "26", "10,000 requests to all routes: no 5xx, no crash, a free event loop", partial(fuzz.fuzz, count=10_000)
    ),
    _tests(
        "27",
        "extremes in every parameter: 400 that names it",
        FRONTEND + "test_bad_input.py",
        FRONTEND + "test_hostile_input.py",
    ),
    _tests(
        "28",
        "bombs in grammars, schemas and templates: ended in time",
        "tests/text/test_grammars.py",
        "tests/text/test_sandbox.py",
        LOOP + "test_no_schema_holds_the_loop",
    ),
    Experiment(
        "28a",
        "10,000 schemas, each another: memory stays, the event loop is free",
        partial(schemas.unique_schemas, count=10_000),
    ),
    _tests(
        "31",
        "mutated files, texts of tool calls, and streams: no uncaught exception",
        "tests/text/calls/test_parser.py",
        "tests/text/test_output.py",
        "tests/gguf/test_header.py",
        "tests/weights/test_safetensors_file.py",
        "tests/weights/test_hub.py",
        BOUNDS + "test_a_scan_does_not_depend_on_how_the_text_is_cut",
    ),
)
SOAK = Experiment("32", "everything mixed: available, memory flat, all given back", soak.soak)
