"""`penstock serve --api-processes 2 --context-policy summarise:MODEL` with a real model."""

import re
from pathlib import Path

import httpx

from tests.e2e.server import serving
from tests.patience import PATIENCE
from tests.smollm2 import smollm2

FLAGS = ("--api-processes", "2", "--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory", "256MiB")


def test_each_process_has_the_summaries_of_both(tmp_path: Path) -> None:
    """The same long chat has one summary and one prompt, whichever process gets it."""
    turns = [f"Fact {number}: the {number}th lighthouse stands on rock {7 * number}." for number in range(18)]
    chat = [{"role": role, "content": text} for text in turns for role in ("user", "assistant")][:-1]
    body = {"messages": chat, "max_tokens": 4, "temperature": 0}
    policy = ("--served-model-name", "small", "--context-policy", "summarise:small")
    written, prompts, cached = [], set(), []
    with serving(tmp_path / "log", *FLAGS, *policy, "--state-dir", "none", model=str(smollm2())) as server:
        for number in range(100):
            answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert int(answer.headers["x-summarised-messages"]) == usage["summary"]["messages"] > 10
            written += [number] if "x-summary-tokens" in answer.headers else []
            prompts.add(usage["prompt_tokens"])
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            if {"0", "1"} <= set(re.findall(r"api-(\d): request", server.log.read_text())):
                break
        else:
            raise AssertionError("one process got all connections")
    assert written == [0] and len(prompts) == 1
    assert number and min(cached[1:]) >= min(prompts) - 16, "the prompt with the summary is in the prefix cache"
