"""`penstock serve` with SmolLM2's GGUF file, through a real client: what it says, alone and divided among ranks."""

from pathlib import Path

import openai
import pytest

from tests.e2e.server import Server, serving
from tests.smollm2 import smollm2

FLAGS = ("--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "64MiB", "--device", "cpu")
# Each token of these answers is at least twice as likely as the next best one, so that rounding does not decide.
QUESTIONS = {
    "What is the capital of France? Answer in one sentence.": "Paris",
    "What is the capital of Japan?": "Tokyo",
}
SPLITS = {
    "tensor": ("--tensor-parallel-size", "3"),  # it has 3 KV heads
    "pipeline": ("--pipeline-parallel-size", "2"),
}


PIRATE = "You are a pirate. You talk like a pirate."


def answers(server: Server) -> list[str]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert model.id == "smollm2-135m"
        said = []
        for question in QUESTIONS:
            answer = client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=32,
            )
            said.append(answer.choices[0].message.content or "")
        return said


def introduction(server: Server, before: list[dict[str, str]]) -> str:
    """The streamed answer to a question for the model's name, with the model's own sampling."""
    question = {"role": "user", "content": "What is your name?"}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=[*before, question],  # type: ignore[list-item]
            max_tokens=24,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    log = tmp_path_factory.mktemp("one") / "log"
    with serving(log, *FLAGS, model=str(smollm2())) as server:
        said = answers(server)
        assert answers(server) == said
        assert introduction(server, []).startswith("My name is")
        assert introduction(server, [{"role": "system", "content": PIRATE}]).startswith("Aye")
        text = log.read_text()
        assert (
            "unless a request says otherwise: temperature 0, top_p 0.9, repetition_penalty 1.05, "
            "frequency_penalty 0.3 (the model recommends it;" in text
        )
        assert "weights in Q4_1 and Q8_0 as in the file" in text
        assert smollm2().name in next(line for line in text.splitlines() if " of weights from " in line)
    return said


def test_it_knows_capitals(one_rank: list[str]) -> None:
    for said, capital in zip(one_rank, QUESTIONS.values(), strict=True):
        assert capital in said


# Stages are in tests/e2e/processes/test_ranks.py, with another model.
@pytest.mark.parametrize("split", ["tensor", pytest.param("pipeline", marks=pytest.mark.rare)])
def test_ranks_say_the_same(split: str, tmp_path: Path, one_rank: list[str]) -> None:
    with serving(tmp_path / "log", *FLAGS, *SPLITS[split], model=str(smollm2())) as server:
        assert answers(server) == one_rank
