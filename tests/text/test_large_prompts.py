"""Large prompts are encoded in a process: the same ids and errors, and an end to what takes too long."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.text import ChatTemplateError, Tokenizer, TokenizerError
from penstock.text.calls import ChatFormat
from penstock.text.process import WorkerEnded
from penstock.text.prompts import (
    EncodeChat,
    EncodePair,
    EncodeText,
    PromptEncoder,
    PromptQuestion,
    PromptTooLong,
    PromptTooSlow,
    PromptWorkers,
)
from tests.checkpoints import write_tokenizer
from tests.smollm2 import smollm2

CONTEXT = 131072
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
SORTS = "{% for message in messages %}{{ extra | sort | length }}{% endfor %}"  # no loop of its own takes long


def chat(messages: int = 1, **variables: object) -> EncodeChat:
    asked = [{"role": "user", "content": f"what is {i}?"} for i in range(messages)]
    return EncodeChat(asked, [TOOL], True, False, False, variables)


def make(path: Path, seconds: float = 10.0) -> tuple[PromptEncoder, PromptWorkers]:
    tokenizer = Tokenizer.load(path)
    encoder = PromptEncoder(tokenizer, ChatFormat(tokenizer), CONTEXT)
    return encoder, PromptWorkers(tokenizer, encoder, CONTEXT, seconds=seconds)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[PromptEncoder, PromptWorkers]]:
    encoder, workers = make(smollm2())
    yield encoder, workers
    workers.close()


@pytest.mark.parametrize(
    "question",
    [
        EncodeText("Grüße, \N{SMILING FACE WITH OPEN MOUTH}\n\u2028" * 3000, add_special_tokens=True),
        chat(50),
        EncodePair("a query", "a document " * 1000, add_special_tokens=True),
        EncodePair("a text", None, add_special_tokens=False),
    ],
    ids=lambda question: type(question).__name__,
)
def test_the_process_gives_the_same_ids(both: tuple[PromptEncoder, PromptWorkers], question: PromptQuestion) -> None:
    encoder, workers = both
    expected = encoder.encode(question)
    assert workers.encode(question) == expected
    assert expected.ids
    assert workers._idle, "no process did it"


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (EncodeText("7" * 2_000_000, True), PromptTooLong),
        (EncodeText("\ud800", True), TokenizerError),
        (EncodeChat([], None, True, False, False, {}), ChatTemplateError),
        (EncodeChat([{"role": "user", "content": 5}], None, True, True, False, {}), ChatTemplateError),
    ],
)
def test_the_process_gives_the_same_errors(
    both: tuple[PromptEncoder, PromptWorkers], question: PromptQuestion, error: type[ValueError]
) -> None:
    encoder, workers = both
    messages = []
    for encode in (encoder.encode, workers.encode):
        with pytest.raises(error) as caught:
            encode(question)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def test_a_text_that_takes_too_long_ends_its_process_only() -> None:
    hostile, plain = EncodeText(" " * 1_040_000, True), EncodeText("plain " * 1000, True)
    encoder, _ = make(smollm2())
    began = time.thread_time()
    encoder.encode(hostile)
    limit = round((time.thread_time() - began) / 3, 3)
    encoder, workers = make(smollm2(), limit)
    with ThreadPoolExecutor(2) as threads:
        refused, answered = threads.submit(workers.encode, hostile), threads.submit(workers.encode, plain)
        with pytest.raises(PromptTooSlow, match=rf"more than {limit:g} s of processor time, .* shorten it"):
            refused.result()
        assert answered.result() == encoder.encode(plain)
    assert len(workers._idle) == 1
    workers.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SORTS}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    return tmp_path


def test_a_template_that_takes_too_long_on_its_arguments(folder: Path) -> None:
    encoder, workers = make(folder, 0.4)
    words = [f"{i * 7919 % 60_000:05}" for i in range(5000)]
    try:
        assert workers.encode(chat(1, extra=words)) == encoder.encode(chat(1, extra=words))
        with pytest.raises((PromptTooSlow, ChatTemplateError)):  # its loop ends as well, by the clock
            workers.encode(chat(2000, extra=words))
        assert workers.encode(chat(2, extra=words[:5])) == encoder.encode(chat(2, extra=words[:5]))
    finally:
        workers.close()


def test_a_tokenizer_whose_files_have_changed_is_not_loaded_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder, workers = make(folder)
    os.utime(folder / "tokenizer.json", ns=(0, 0))
    question = EncodeText("some text", add_special_tokens=True)
    assert workers.encode(question) == encoder.encode(question)
    assert "long prompts are tokenised by threads" in caplog.text
    assert not workers._idle


def test_no_process_is_left_after_the_end() -> None:
    """Not even that of a prompt whose client has gone, which a thread still encodes."""
    _, workers = make(smollm2())
    workers.encode(chat())
    (idle,) = workers._idle
    busy = threading.Thread(target=workers.encode, args=(chat(2000),))
    busy.start()
    workers.close()
    busy.join()
    assert not idle.runs and not workers._idle


def test_a_process_that_something_else_ended_says_nothing_about_its_text() -> None:
    """As when the kernel kills it because memory is short: the text is not refused for good."""
    encoder, workers = make(smollm2())
    text = EncodeText("plain " * 1000, True)
    try:
        assert workers.encode(text) == encoder.encode(text)
        (process,) = workers._idle
        with ThreadPoolExecutor(1) as threads:
            process._process.send_signal(signal.SIGSTOP)
            asked = threads.submit(workers.encode, text)
            time.sleep(0.2)
            process._process.kill()
            with pytest.raises(WorkerEnded, match="was killed, or had no answer"):
                asked.result()
        assert workers.encode(text) == encoder.encode(text)
    finally:
        workers.close()
