"""`penstock batch`, with real processes that are killed."""

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.batch import _answered, _open_answers
from tests.cli.conftest import RunCommand
from tests.patience import wait_for

REQUESTS = 40
FLAGS = ("--model", "python-8m", "--threads", "1", "--max-num-seqs", "2", "--kv-cache-memory", "16MB")


def line(custom_id: str, **body: Any) -> str:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    lines = [line(f"r{i}", prompt=f"def f{i}(", max_tokens=40, temperature=0) for i in range(REQUESTS)]
    lines[7] = line("r7", prompt="", max_tokens=4)
    path.write_text("".join(lines))
    return path


def start(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "batch", *map(str, words), *FLAGS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(*words: str | Path, **options: Any) -> tuple[int, str]:
    child = start(*words, **options)
    out, err = child.communicate(timeout=120)
    assert out == ""
    return child.returncode, err


def answers_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def wait_for_lines(path: Path, count: int) -> None:
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, f"{count} answers", tick=0.01)


def check(answers: Path) -> None:
    read = answers_of(answers)
    assert sorted(answer["custom_id"] for answer in read) == sorted(f"r{i}" for i in range(REQUESTS))
    for answer in read:
        response = answer["response"]
        if answer["custom_id"] == "r7":
            assert response["status_code"] == 400 and "empty" in response["body"]["error"]["message"]
        else:
            assert response["status_code"] == 200 and response["body"]["usage"]["completion_tokens"] == 40


@pytest.mark.rare
def test_each_request_is_answered_once_however_often_the_run_is_killed(requests: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    points = sorted(random.Random(10).sample(range(1, REQUESTS - 4), 10))
    for point in points:
        child = start(requests, answers)
        wait_for_lines(answers, point)
        child.kill()
        child.communicate()
    code, said = run(requests, answers)
    assert code == 0 and "going on with the others" in said
    check(answers)
    assert run(requests, answers) == (0, f"{answers} has {REQUESTS} of {REQUESTS} answers: nothing is left to do\n")


def test_each_request_is_answered_once_after_a_full_disk_a_kill_and_an_interrupt(
    requests: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    limit = 4000  # bytes: a disk that becomes full

    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, said = run(requests, answers, preexec_fn=full_disk)
    assert code == 1 and "cannot be written: File too large; the same command goes on" in said
    assert answers.stat().st_size == limit and not answers.read_bytes().endswith(b"\n")
    child = start(requests, answers)  # a line that was not written to its end is written again
    wait_for_lines(answers, 12)
    child.kill()
    child.communicate()
    child = start(requests, answers)
    wait_for_lines(answers, 24)
    child.send_signal(signal.SIGTERM)
    assert "interrupted: answered" in child.communicate()[1] and child.returncode == 130
    code, said = run(requests, answers)
    assert code == 0 and "going on with the others" in said
    check(answers)
    assert run(requests, answers) == (0, f"{answers} has {REQUESTS} of {REQUESTS} answers: nothing is left to do\n")


def test_a_large_file_of_answers_is_read_in_a_moment(tmp_path: Path) -> None:
    path, ids = tmp_path / "answers.jsonl", {f"r{i}" for i in range(3000)}
    path.write_text("".join(json.dumps({"custom_id": one, "response": {"body": "x" * 1000}}) + "\n" for one in ids))
    with _open_answers(path) as file:
        began = time.thread_time()
        assert _answered(file, ids, "answers.jsonl") == ids
        assert time.thread_time() - began < 0.5
        assert file.tell() == path.stat().st_size


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no requests; write one JSON object a line"),
        (["{"], "line 1: the line is not valid JSON: Input data was truncated; a line is {"),
        (['\ufeff{"custom_id": "a"}'], "line 1: the line is not valid JSON: it begins with a byte order mark"),
        (['{"custom_id": 5}'], "line 1: custom_id is an integer; it must be a string; a line is {"),
        ([line("a", prompt="b"), line("a", prompt="b")], "line 2: custom_id 'a' was used before"),
        ([line("", prompt="b")], "custom_id has 0 characters"),
        ([line("a" * 513, prompt="b")], "custom_id has 513 characters"),
        (['{"custom_id":"a","url":"/v1/embedding","body":{}}'], "url is '/v1/embedding'; it must be one of"),
        (['{"custom_id":"a","url":"/v1/completions","body":3}'], "body is not an object"),
        (['{"custom_id":"a","url":"/v1/completions","body":{},"method":"GET"}'], "method is 'GET'"),
        (['{"custom_id":"a","url":"/v1/completions"}'], "line 1: body is missing"),
        (['{"custom_id":"a","body":' + "[" * 10**5], "line 1: "),
    ],
)
def test_wrong_requests_are_named_before_anything_starts(
    lines: Sequence[str], words: str, tmp_path: Path, run_command: RunCommand
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(lines))
    done = run_command("batch", str(path), str(tmp_path / "answers.jsonl"), *FLAGS)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "answers.jsonl").exists()


def test_wrong_files_are_named(requests: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("a diary\n")
    assert "not an answer of a batch" in run(requests, other)[1] and other.read_text() == "a diary\n"
    other.write_text('{"custom_id":"r999"}\n')
    assert "which REQUESTS does not ask" in run(requests, other)[1]
    assert "another file for the answers" in run(requests, requests)[1]
