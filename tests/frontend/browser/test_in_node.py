"""The playground's stream of an answer, run by Node."""

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node: apt install nodejs")
PAGES = files("penstock.frontend.pages")
SCRIPT = """
import fs from "node:fs";
globalThis.document = { hidden: true };
globalThis.sessionStorage = { getItem: () => null };
let sent = 0, ended = false;
const event = (fields) => new TextEncoder().encode(`data: ${JSON.stringify(fields)}\\n\\n`);
globalThis.fetch = async () => new Response(new ReadableStream({
  pull(controller) {
    sent += 1;
    const last = sent === LENGTH;
    const choice = { index: 0, delta: { content: "a" }, finish_reason: last ? "stop" : null };
    controller.enqueue(event({ choices: [choice] }));
    if (last) controller.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
  },
  cancel() { ended = true; },
}), { status: 200 });
const { generate, newVersion, Live } = await import(GENERATE);
const version = newVersion();
await generate("/v1/chat/completions", BODY, [version], new Live(), undefined);
await new Promise((done) => setTimeout(done, 50));
console.log(JSON.stringify({ finish: version.finish, text: version.text.length, ended, error: version.error }));
"""


def _generate(length: int, body: dict[str, Any]) -> dict[str, Any]:
    """Runs generate() on a server whose answer has `length` tokens."""
    assert NODE is not None
    values = {"LENGTH": length, "BODY": body, "GENERATE": f"{PAGES}/playground/generate.js"}
    script = SCRIPT
    for name, value in values.items():
        script = script.replace(name, json.dumps(value))
    command = [NODE, "--experimental-default-type=module", "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_answer_that_does_not_end_pauses_and_ends_the_request() -> None:
    found = _generate(10_000, {"messages": []})
    assert found == {"finish": "paused", "text": 2048, "ended": True, "error": ""}


@pytest.mark.parametrize("body", [{"messages": [], "max_tokens": 5000}, {"prompt": "a"}])
def test_a_length_that_the_user_has_set_holds(body: dict[str, Any]) -> None:
    assert _generate(3000, body)["finish"] == "stop"


def test_a_short_answer_ends_by_itself() -> None:
    found = _generate(5, {"messages": []})
    assert (found["finish"], found["text"], found["error"]) == ("stop", 5, "")
