"""`penstock serve` with a model that several ranks share, through a real client."""

import asyncio
import os
import re
import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.processes.test_death import started, texts
from tests.e2e.server import Server, gauge, serving, status
from tests.engine.processes import alive, children
from tests.patience import wait_for

FLAGS = ("--max-num-seqs", "16", "--kv-cache-memory", "64MiB", "--dtype", "float32", "--step-deadline", "20")
PROMPTS = ["import os\n", "def main():\n    ", "class Stack:\n    def __init__(self"]
GRAMMAR = "[a-z]{5,9}=[0-9]{3}"
SPLITS = {
    "tensor": ("--tensor-parallel-size", "2"),
    "pipeline": ("--pipeline-parallel-size", "2", "--speculation", "suffix"),
}


def completions(server: Server) -> list[str]:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            how = [(prompt, {}) for prompt in PROMPTS] + [(PROMPTS[0], {"guided_regex": GRAMMAR})]
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=model, prompt=prompt, max_tokens=40, temperature=0, extra_body=body)
                    for prompt, body in how
                )
            )
            assert re.fullmatch(GRAMMAR, answers[-1].choices[0].text)
            return [answer.choices[0].text for answer in answers]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with serving(tmp_path_factory.mktemp("one") / "log", *FLAGS) as server:
        return completions(server)


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_say_what_one_says_and_end_together(tmp_path: Path, one_rank: list[str], split: str) -> None:
    with serving(tmp_path / "log", *FLAGS, *SPLITS[split]) as server:
        ranks = children(server.engine_pid)
        assert completions(server) == one_rank
        assert len(ranks) == 2
        assert f"rank 1 (pid {max(ranks)}) has layers" in server.log.read_text()
        if split == "pipeline":  # its drafts are from the answer before, while nothing else runs
            wait_for(lambda: asked_alone(server) == one_rank[0] and accepted(server) > 0, "accepted drafts")
    assert not any(map(alive, ranks))


def asked_alone(server: Server) -> str:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=40, temperature=0)
        return answer.choices[0].text


def accepted(server: Server) -> float:
    return gauge(server.get("/metrics").text, "penstock_spec_decode_num_accepted_tokens_total")


def test_streams_go_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    # Drafts from the same answers before would end the streams too soon.
    with serving(tmp_path / "log", *FLAGS, *SPLITS["tensor"], "--seed", "7", "--speculation", "off") as server:
        undisturbed = texts(started(server, 8, max_tokens=300))
        streams = started(server, 8, max_tokens=300)
        engine = server.engine_pid
        ranks = sorted(children(engine))
        os.kill(ranks[1], signal.SIGKILL)
        assert all(stream.is_alive() for stream in streams)
        wait_for(lambda: status(server.url + "/readyz") == 503, "readiness to turn false")
        assert texts(streams) == undisturbed
        assert f"rank 1 (pid {ranks[1]}) was killed by SIGKILL" in server.log.read_text()
        wait_for(lambda: not any(map(alive, [engine, *ranks])), "every process to end")
