"""A process for work on texts that may take too long: python -m penstock.text.worker

A thread cannot be stopped. So grammars are compiled here first, and long prompts are rendered and encoded here. The
system ends this process when a text takes too much time or memory, and the next one gets a new process.
The first line of standard input says what for (a Setup); each line gets one line as its answer.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from penstock.text.grammars.questions import Setup
from penstock.text.prompts.questions import PromptSetup

MEMORY = 1 << 30  # bytes of address space beyond what the process has at its start


def main() -> None:
    """Answers lines until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the process group is for the server
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup | PromptSetup)
    if isinstance(setup, Setup):
        from penstock.text.grammars.answers import grammar_answers

        answer = grammar_answers(setup)
    else:
        from penstock.text.prompts.answers import prompt_answers

        try:
            answer = prompt_answers(setup)
        except (RuntimeError, ValueError) as error:
            sys.exit(f"{error}")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(b"{}")
    while line := sys.stdin.buffer.readline():
        _write(answer(line))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
