"""lm-eval gets transformers' log-likelihoods from a server.

python -m tests.clients install FOLDER lm_eval
TEST_CLIENTS=FOLDER pytest -m "" tests/clients/test_lm_eval.py
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.clients.matrix import CLIENTS, Client
from tests.e2e.server import serving
from tests.invariance.test_gguf_tokens import write_dense
from tests.smollm2 import smollm2

HERE = Path(__file__).parent
TASK = HERE / "lm_eval_task.yaml"
pytestmark = pytest.mark.rare


@pytest.fixture(params=[client for client in CLIENTS if client.package == "lm_eval"], ids=lambda client: client.name)
def lm_eval(request: pytest.FixtureRequest) -> Path:
    """The program."""
    client: Client = request.param
    if not client.is_installed():
        pytest.skip(f"TEST_CLIENTS has no {client.name}")
    return client.runtime().with_name("lm_eval")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in float32, with its tokenizer: a folder that transformers reads too."""
    folder = write_dense(tmp_path_factory.mktemp("dense"))
    path = smollm2()
    transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--dtype", "float32", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")
    with serving(tmp_path_factory.mktemp("serve") / "log", *flags, model=str(model)) as running:
        yield running.url


@pytest.mark.parametrize("tokenizer", ["remote", "huggingface"])
@pytest.mark.parametrize("batch", [1, 4])
def test_log_likelihoods_and_greedy_flags(
    lm_eval: Path, tokenizer: str, batch: int, model: Path, url: str, tmp_path: Path
) -> None:
    """`remote` takes the server's /tokenize and /tokenizer_info, as lm-eval does by default where there are any."""
    samples = evaluate(lm_eval, url, tmp_path, batch, f"tokenizer_backend={tokenizer},tokenizer={model}")
    tokens = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    compared = 0
    for sample in samples:
        # The second answer to a choice is for acc_mutual_info, which is not among the metrics.
        for argument, (answer, greedy) in zip(sample["arguments"].values(), answers(sample), strict=True):
            context, choice = argument["arg_0"], argument["arg_1"]
            whole, begin = tokens(context + choice)["input_ids"], len(tokens(context)["input_ids"])
            with torch.no_grad():
                rows = reference(torch.tensor([whole])).logits[0].log_softmax(-1)[begin - 1 : -1]
            expected = rows.gather(1, torch.tensor(whole[begin:])[:, None]).sum().item()
            assert answer == pytest.approx(expected, abs=1e-4)
            assert greedy == (rows.argmax(-1).tolist() == whole[begin:])
            compared += 1
    assert compared == 24
    assert {greedy for sample in samples for _, greedy in answers(sample)} == {True, False}


def evaluate(lm_eval: Path, url: str, folder: Path, batch: int, arguments: str) -> list[dict[str, Any]]:
    """The samples that lm-eval logs for our task."""
    model = f"model=smollm2,base_url={url}/v1/completions,tokenized_requests=True,{arguments}"
    command = [
        *(lm_eval, "--model", "local-completions", "--model_args", model, "--tasks", TASK),
        *("--batch_size", batch, "--output_path", folder, "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run(
        list(map(str, command)), cwd=HERE, env=os.environ | offline, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (logged,) = folder.rglob("samples_*.jsonl")
    return [json.loads(line) for line in logged.read_text().splitlines()]


def answers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """(log-likelihood, whether it is greedy) of each choice."""
    return [(float(answer), str(greedy) == "True") for [(answer, greedy)] in sample["resps"]]
