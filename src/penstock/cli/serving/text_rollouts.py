"""Compares two versions of a language model on requests of users, and on those of a golden set."""

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace

from penstock.cli.serving.text_judges import TEXT_JUDGES, Likelihood, TextOutcome, TextPair, likelihood_of
from penstock.frontend.local import LocalRequests
from penstock.frontend.versions.serving import Serving, Version
from penstock.messages import EngineError
from penstock.messages.tensors import TensorModel
from penstock.repository.rollouts.decision import EQUAL
from penstock.repository.rollouts.rollout import Rollout

GOLDEN = "golden.jsonl"  # in the model's folder: bodies of requests
MAX_GOLDEN_BYTES = 16 << 20
BUSY = (429, 503, 504)  # no fault of a version: requests of users come first
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Fields of a body that a copy has not: how the answer is sent, and whose it is.
_NOT_COPIED = {
    *("model", "stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo"),
    *("user", "store", "metadata", "priority", "timeout", "cache_salt"),
}


class TextComparison:
    """See penstock.repository.rollouts.rollout.Comparison. Both versions answer a copy of a request, one after the
    other, at low priority; so they have the same load, and the user's answer waits for neither."""

    def __init__(
        self,
        rollout: Rollout,
        serving: Serving,
        candidate: Version,
        requests: tuple[LocalRequests, LocalRequests],
        promote: Callable[[], None],
    ) -> None:
        """New requests for `serving` get the candidate as far as the rollout says. `requests` answer with the
        incumbent and with the candidate."""
        self._rollout, self._serving, self._candidate = rollout, serving, candidate
        self._requests, self._promote = requests, promote
        serving.rollout = self

    def begin(self, path: Path) -> None:
        """Runs the golden set in this file, if there is one and it was not run before."""
        if path.exists() and not self._rollout.record.prepared:
            self._rollout.preparing = True
            self._rollout.copy(partial(self._prepare, path), always=True)

    def pick(self, key: str) -> Version | None:
        """Returns the candidate if a request gets it. See Rollout.takes."""
        return self._candidate if self._rollout.takes(key) else None

    def compare(self, path: str, body: bytes) -> None:
        """Runs a copy of a user's request on both versions, unless enough copies run."""
        self._rollout.copy(partial(self._compare, path, body))

    def arm(self, candidate: bool) -> TensorModel | None:
        return None

    def label(self, request_id: str, label: Any) -> bool:
        """See Comparison. No judge of texts needs labels."""
        return False

    def end(self, *, promoted: bool) -> None:
        self._serving.rollout = None
        if promoted:
            self._promote()

    async def _prepare(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                lines = [line for line in file.read(MAX_GOLDEN_BYTES).splitlines() if line.strip()]
            for line in lines:
                await self._compare(CHAT if "messages" in orjson.loads(line) else COMPLETION, line)
            self._rollout.record.prepared = True
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = f"{path} cannot be used: {error}; repair it, or remove it"
            self._rollout.set_state(replace(self._rollout.record.state, status="aborted", reason=reason))
        finally:
            self._rollout.preparing = False
        self._rollout.look()

    async def _compare(self, path: str, body: bytes) -> None:
        fields = {name: value for name, value in orjson.loads(body).items() if name not in _NOT_COPIED}
        fields.setdefault("seed", random.getrandbits(31))
        outcomes: dict[int, TextOutcome] = {}
        for arm in random.sample((0, 1), 2):  # neither always comes first
            if (outcome := await self._answer(arm, path, fields)) is None:
                return
            outcomes[arm] = outcome
        pair = TextPair(fields, outcomes[0], outcomes[1])
        if self._rollout.judges & {"likelihood", "agreement"} and pair.incumbent.text:
            found = [await self._likelihood(arm, path, fields, pair.incumbent) for arm in (0, 1)]
            if found[0] is not None and found[1] is not None:
                pair = pair._replace(likelihoods=(found[0], found[1]))
        for judge in self._rollout.judges & TEXT_JUDGES.keys():
            # The version that has answered the user has prefixes and drafts of the request: it is faster.
            if judge != "latency" or self._rollout.record.share == EQUAL:
                self._rollout.add(judge, TEXT_JUDGES[judge](pair))
        answers = {"incumbent": pair.incumbent._asdict(), "candidate": pair.candidate._asdict()}
        await self._rollout.ask(lambda: {"request": fields, **answers})
        self._rollout.look()

    async def _answer(self, arm: int, path: str, fields: Mapping[str, Any]) -> TextOutcome | None:
        """The answer of a version; None if the server is too busy for copies."""
        began = time.monotonic()
        status, answer = await self._ask(arm, path, fields)
        seconds = time.monotonic() - began
        if status != 200:
            return None if status in BUSY else TextOutcome(True, seconds)
        choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
        message = choice.get("message") or {}
        text = choice.get("text") or message.get("content") or ""
        return TextOutcome(False, seconds, text, tokens, bool(message.get("tool_calls")))

    async def _likelihood(self, arm: int, path: str, fields: Mapping[str, Any], of: TextOutcome) -> Likelihood | None:
        """How likely a version finds an answer; None if it cannot be scored, as with a prompt of token ids."""
        body: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 1}
        if path == CHAT:
            message = {"role": "assistant", "content": of.text}
            body |= {"messages": [*fields["messages"], message], "continue_final_message": True}
            body |= {"add_generation_prompt": False}
        elif isinstance(fields.get("prompt"), str) and not fields.get("suffix"):
            body |= {"prompt": fields["prompt"] + of.text}
        else:
            return None
        status, answer = await self._ask(arm, path, body)
        if status != 200:
            return None
        rows = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or []
        return likelihood_of(rows, of.text, of.tokens)

    async def _ask(self, arm: int, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """The status and the answer of a version. An engine that has ended is status 500."""
        try:
            answer = await self._requests[arm].answer(path, orjson.dumps(body))
        except EngineError:
            return 500, None
        return answer.status, orjson.loads(answer.body)
