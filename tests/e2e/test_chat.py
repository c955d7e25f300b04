"""`penstock run` with the default model, as a user has it: in a terminal, and in a pipe."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.test_help import penstock
from tests.e2e.terminal import CTRL_C, CTRL_D, ENTER, UP, Terminal, without_waiting
from tests.engine.processes import alive, children

SMALL = ("--threads", "1", "--max-model-len", "1024", "--kv-cache-memory", "64MiB", "--max-num-seqs", "1")
READY = "Type a message, or /? for help"  # an empty prompt
COMMAND = (sys.executable, "-m", "penstock", "run")


def test_a_session(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with Terminal("run", "--stats", *SMALL, state=str(tmp_path)) as terminal:
        sampling = "smollm2-135m: temperature 0, top_p 0.9, repetition_penalty 1.05, frequency_penalty 0.3."
        assert sampling in " ".join(terminal.until(READY).split())  # it is broken between words

        for prompt, word in (
            ("What is the capital of Germany?", "Berlin"),
            ("What is the population of that city?", "Berlin"),
            ("Name one museum there.", "Berlin"),
        ):
            terminal.press(prompt + ENTER)
            answer = terminal.until(READY)
            assert word in answer
            assert re.search(r"\d+ tokens, \d+\.\d tok/s, first token after \d+\.\d\d s", answer)

        terminal.press("Write a long story about a dragon." + ENTER)
        terminal.until("Once upon a time")
        terminal.press(CTRL_C)
        assert "(stopped; the conversation has the answer so far)" in terminal.until(READY)

        terminal.press(UP)
        terminal.until("Write a long story about a dragon.")
        terminal.press(UP)
        terminal.until("Name one museum there.")
        terminal.press(CTRL_C)  # clears the line
        terminal.until(READY)

        terminal.paste("Which of these is a fruit?\napple\nchair")
        terminal.until("chair")
        terminal.press(ENTER)
        terminal.until(READY)

        terminal.press(f"/save {saved}{ENTER}")
        terminal.until("saved 5 turns")
        terminal.press(CTRL_D)
        assert terminal.wait() == 0
    messages = [message["content"] for message in json.loads(saved.read_text())["messages"]]
    assert messages[6] == "Write a long story about a dragon." and messages[7].startswith("Once upon a time")
    assert messages[8] == "Which of these is a fruit?\napple\nchair"


def test_the_next_session_and_an_engine_that_dies(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with Terminal("run", "python-8m", *SMALL, state=str(tmp_path)) as terminal:
        terminal.until(READY)
        terminal.press("/system Write short functions." + ENTER)
        terminal.until(READY)
        terminal.press(CTRL_C)
        terminal.until("Ctrl-C again, Ctrl-D or /bye leaves.")
        terminal.until(READY)
        terminal.press(CTRL_C)
        assert terminal.wait() == 0 and terminal.echoes()
    with Terminal("run", "python-8m", "--max-tokens", "8", *SMALL, state=str(tmp_path)) as terminal:
        terminal.until(READY)
        terminal.press(UP)
        terminal.until("/system Write short functions.")
        terminal.press(CTRL_C)
        terminal.until(READY)
        terminal.press("Read a file." + ENTER)
        assert '(cut at max_tokens 8; type "go on", or /set max_tokens N allows more)' in terminal.until(READY)
        (engine,) = children(terminal.process.pid)
        os.kill(engine, signal.SIGKILL)
        terminal.press("Read a file." + ENTER)
        assert "was killed by SIGKILL" in terminal.until("keeps the conversation; then")
        terminal.until(READY)
        terminal.press(f"/save {saved}{ENTER}")
        terminal.until("saved 1 turn")
        terminal.press("/bye" + ENTER)
        assert terminal.wait() == 1
    assert not alive(engine)


def test_a_session_that_is_terminated_gives_the_terminal_back(tmp_path: Path) -> None:
    with Terminal("run", "python-8m", *SMALL, state=str(tmp_path)) as terminal:
        terminal.until(READY)
        assert not terminal.echoes()
        terminal.process.terminate()
        assert terminal.wait() == 143 and terminal.echoes()


def test_a_pipe() -> None:
    short = ("--max-tokens", "12", *SMALL)
    done = penstock("run", "What is the capital of the country below?", *short, stdin="Country: France\n")
    assert done.returncode == 0, done.stderr  # which may say what is waited for
    assert "Paris" in done.stdout and done.stdout.endswith("\n") and "\x1b" not in done.stdout
    told = penstock("run", "smollm2-135m", "--system", "Answer in Spanish.", "--stats", *short, stdin="Hello\n")
    assert told.returncode == 0 and re.fullmatch(r"\d+ tokens, .* s\n", without_waiting(told.stderr))
    assert "Hola" in told.stdout


def test_ctrl_c_ends_one_answer_with_130() -> None:
    """What was said until then is on the screen, and no process is left."""
    command = [*COMMAND, "Write a long story about a dragon.", *SMALL]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read(20)
        (engine,) = children(process.pid)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert (process.returncode, without_waiting(errors)) == (130, "")
    assert said.startswith("Once upon a time") and rest.endswith("\n")
    assert not alive(engine)


def test_a_reader_that_leaves_is_no_error() -> None:
    script = f"{' '.join(COMMAND)} 'Write a long story about a dragon.' {' '.join(SMALL)} </dev/null | head -c 4"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, without_waiting(done.stderr)) == ("Once", "")
