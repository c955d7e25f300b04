"""The formats of recorded traffic, on lines as their tools write them."""

import json
from pathlib import Path

import pytest

from penstock.schedule import EventFile
from penstock.simulate.traffic.request import TokenIds, expand
from penstock.simulate.traffic.traces import TraceRow, read_trace
from tests.schedule.simulated import request
from tests.schedule.simulated import simulation as scheduled

MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [7, 8, 9]}
{"timestamp": 3500, "input_length": 600, "output_length": 5, "hash_ids": [7, 10]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-17 00:00:00.0,396,109
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
_ASKED = '{"ts": "2026-11-27T10:00:%s+00:00", "message": "request", "seconds": %s, "prompt_tokens": %d, '
REQUEST_LOG = (
    '{"ts": "2026-11-27T10:00:00.000+00:00", "level": "info", "process": "api", "message": "serving"}\n'
    + (_ASKED % ("03.000", 2.0, 12) + '"completion_tokens": 4}\n')
    + (_ASKED % ("03.500", 0.5, 9) + '"completion_tokens": 1}\n')
)


def read(folder: Path, text: str) -> list[TraceRow]:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path, TokenIds())


def test_mooncake(tmp_path: Path) -> None:
    first, second = read(tmp_path, MOONCAKE)
    assert (first.at, second.at) == (0.0, 2.5)
    prompts = expand(first.prompt), expand(second.prompt)
    assert [len(prompt) for prompt in prompts] == [1100, 600]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0][512] != prompts[1][512]
    assert (first.output, second.output) == (20, 5)


def test_azure(tmp_path: Path) -> None:
    first, second = read(tmp_path, AZURE)
    assert second.at - first.at == pytest.approx(5 * 3600 + 44 * 60 + 13.31941)
    assert (len(expand(first.prompt)), first.output) == (374, 44)


def test_burst_gpt_leaves_out_failures(tmp_path: Path) -> None:
    rows = read(tmp_path, BURST_GPT)
    assert [(row.at, len(expand(row.prompt)), row.output) for row in rows] == [(0.0, 472, 18), (113.0, 417, 276)]


def test_vllm_bench(tmp_path: Path) -> None:
    result = {"input_lens": [10, 20], "output_lens": [3, 4], "start_times": [100.5, 101.0]}
    assert [(row.at, row.output) for row in read(tmp_path, json.dumps(result))] == [(0.0, 3), (0.5, 4)]
    lines = [{"prompt": "a" * 40, "output_tokens": 7}, {"prompt": "a" * 40, "output_tokens": 9}]
    custom = read(tmp_path, "\n".join(map(json.dumps, lines)) + "\n")
    assert [len(expand(row.prompt)) for row in custom] == [10, 10] and custom[0].prompt == custom[1].prompt
    talk = [{"conversations": [{"from": "human", "value": "b" * 80}, {"from": "gpt", "value": "c" * 20}]}]
    assert [(len(expand(row.prompt)), row.output) for row in read(tmp_path, json.dumps(talk))] == [(20, 5)]


def test_our_request_log(tmp_path: Path) -> None:
    rows = read(tmp_path, REQUEST_LOG)
    assert [(row.at, len(expand(row.prompt)), row.output) for row in rows] == [(0.0, 12, 4), (2.0, 9, 1)]


def test_our_event_log(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("wb", buffering=0) as file:
        one = scheduled(log=EventFile(file, lambda error: None))
        one.add(request("a", 9, 6))
        one.step()
        one.add(request("b", 12, 8))
        one.run()
    rows = read_trace(path, TokenIds())
    assert [(len(expand(row.prompt)), row.output) for row in rows] == [
        (9, len(one.outputs["a", 0].token_ids)),
        (12, len(one.outputs["b", 0].token_ids)),
    ]
    assert rows[1].at > rows[0].at == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no line"),
        ("hello\n", "which no reader knows"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}\n', "is wrong"),
        (AZURE + "2023,1\n", "line 4 has 2 values"),
        (AZURE + "yesterday,1,1\n", "line 4 has the time 'yesterday'"),
        (MOONCAKE + "{\n", "line 3 is no JSON"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(tmp_path, text)
