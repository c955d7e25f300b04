"""What an operator reads when a server starts."""

import re

from penstock import __version__
from tests.e2e.server import Server

HIDDEN = r"( \(those for AMX need AVX512-FP16, which this machine hides\))?"
TIME = r"\d\d:\d\d:\d\d INFO "
LINES = [
    r"engine: read 16 MiB of weights from python-8m in \d+\.\d s, while the engine started",
    rf"engine: weights in bfloat16.*; (native kernels for \w+{HIDDEN}|kernels .*); 1 thread; first step in \d+\.\d\d s",
    rf"penstock {re.escape(__version__)}: python-8m, computed in bfloat16; no API key is required",
    r"memory: \d{3} MiB for the model and up to [\d.]+ [KMG]iB for conversations "
    r"\(the KV cache, taken as it is used\); penstock plan shows more",
    r"room for [\d,]+ tokens of prompts and answers; at most [\d,]+ in a request, and 16 answers at a time",
    r"answers end at <\|endoftext\|> \(0: generation_config.json, config.json, tokenizer_config.json\)",
    r"serving python-8m on http://127.0.0.1:\d+, ready after \d+\.\d s",
    r"open it in a browser to try it; OpenAI\'s API is at /v1, metrics at /metrics; Ctrl-C stops the server",
]


def test_the_start_log_says_what_runs_and_where(server: Server) -> None:
    log = server.log.read_text()
    start = log.partition("Ctrl-C stops the server\n")
    lines = [line for line in "".join(start[:2]).splitlines() if re.match(TIME, line)]
    for expected in LINES:
        assert [line for line in lines if re.fullmatch(TIME + expected, line)], (expected, log)
    assert re.fullmatch(TIME + LINES[-1], lines[-1])
    assert "GB/s" not in log and "WARNING" not in "".join(start[:2])
