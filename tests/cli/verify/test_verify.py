"""`penstock verify`: models that are as they should be, and what it says of those that are not."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from penstock.bench.quality import Score
from penstock.cli.verify.answers import ModelAnswer, judge_answers, judge_quality
from penstock.cli.verify.finding import Finding
from penstock.cli.verify.text_checks import check_text
from penstock.text import ChatTemplate, Tokenizer
from penstock.weights.packaged import SMOLLM2, embedded_model
from tests.cli.conftest import RunCommand
from tests.smollm2 import smollm2

SMALL = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--threads", "1")
LINE = "{{ m.role }}: {{ m.content }}"
PLAIN = "{% for m in messages %}" + LINE + "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(smollm2())


def found(tokenizer: Tokenizer, *, template: str | None = "", stop_ids: Sequence[int] = (2,)) -> dict[str, Finding]:
    """The findings by their check. An empty template is the model's own."""
    if template is None:
        tokenizer.chat_template = None
    elif template:
        tokenizer.chat_template = ChatTemplate(template, {"bos_token": "<|im_start|>"})
    return {finding.check: finding for finding in check_text(tokenizer, stop_ids, 49152)}


def test_a_good_model(run_command: RunCommand, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run_command("verify", SMOLLM2.name, *SMALL, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert {finding["status"] for finding in result["findings"]} == {"ok"}
    assert "Berlin" in result["answers"][0]["text"] and result["answers"][0]["reason"] == "stop"
    assert "13 checks: 13 ok, 0 warning, 0 problem" in done.stdout


def test_a_model_that_does_not_chat(run_command: RunCommand) -> None:
    done = run_command("verify", str(embedded_model()), *SMALL)
    assert done.returncode == 1
    assert "none of 3 answers ended within 256 tokens" in " ".join(done.stdout.replace("│", " ").split())


def test_random_weights_are_a_problem(run_command: RunCommand, tiny_checkpoint: Callable[..., Path]) -> None:
    done = run_command("verify", str(tiny_checkpoint("qwen3")), *SMALL[2:], "--max-model-len", "64")
    assert done.returncode == 1
    assert "bits per byte of English" in done.stdout and "problem" in done.stdout


def test_a_stop_token_that_the_template_does_not_write(tokenizer: Tokenizer) -> None:
    finding = found(tokenizer, stop_ids=(0,))["end of turn"]
    assert finding.status == "problem"
    assert "ends an answer with <|im_end|>, but <|endoftext|> ends it in the engine" in finding.found
    assert "add 2 to eos_token_id in generation_config.json" in finding.remedy


@pytest.mark.parametrize(
    ("template", "check", "status", "said"),
    [
        (None, "chat template", "warning", "the model has none"),
        ("{{ raise_exception('roles must alternate') }}", "chat template", "problem", "roles must alternate"),
        (
            "{% for m in messages if m.role != 'system' %}" + LINE + "{% endfor %}",
            "system prompt",
            "warning",
            "leaves it out",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN,
            "system prompt",
            "warning",
            "no system role",
        ),
        (PLAIN, "end of turn", "warning", "writes nothing after an answer"),
        ("<|user|>" + PLAIN, "markers", "warning", "<|user|> of the template is several tokens"),
        ("{{ messages | length }}" + PLAIN, "later turns", "warning", "does not begin with the last one"),
    ],
)
def test_templates_that_surprise(
    tokenizer: Tokenizer, template: str | None, check: str, status: str, said: str
) -> None:
    finding = found(tokenizer, template=template)[check]
    assert finding.status == status and said in finding.found and finding.remedy


def test_a_begin_token_that_is_written_twice(tokenizer: Tokenizer) -> None:
    """The tokenizer begins every text with <|im_start|>, as Llama's do with their own, and the template has it too."""
    begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer._backend.post_processor = begin
    tokenizer.bos_token_id = 1
    once, twice = (found(tokenizer, template="{{ bos_token }}" * n + PLAIN)["begin token"] for n in (1, 2))
    assert once.status == "ok"
    assert twice.status == "warning" and "2 times" in twice.found


def test_a_tokenizer_of_another_model(tokenizer: Tokenizer) -> None:
    (finding, *_) = check_text(tokenizer, (2,), 32000)
    assert (finding.check, finding.status) == ("vocabulary", "problem")
    assert "has 49152 ids, but the model has scores for 32000" in finding.found


def test_answers_are_judged() -> None:
    good = ModelAnswer("Q?", "An answer.", (), "stop")
    assert {finding.status for finding in judge_answers([good], chats=True)} == {"ok"}
    bad = [replace(good, text=""), replace(good, special=("<|im_end|>",)), replace(good, text="\ufffd")]
    endless = [replace(each, reason="length") for each in bad]
    findings = {finding.check: finding.status for finding in judge_answers(endless, chats=True)}
    assert findings == {
        "answers": "problem",
        "end of answers": "problem",
        "special tokens": "warning",
        "characters": "warning",
    }


@pytest.mark.parametrize(
    ("bits", "status"), [(0.9, "ok"), (2.0, "warning"), (7.9, "problem"), (float("nan"), "problem")]
)
def test_quality_is_judged(bits: float, status: str) -> None:
    nats = bits * 0.6931471805599453 * 4  # four bytes a token
    assert judge_quality(Score((nats * 10,), (10,), 1.0), 40).status == status
