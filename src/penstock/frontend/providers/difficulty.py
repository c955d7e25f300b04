"""Estimates from a prompt whether a small model's answer is good enough: logistic regression over a few features.

Words are hashed as Weinberger et al. do, 2009, https://arxiv.org/abs/0902.2206. `penstock route fit` finds the weights.
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import msgspec
import orjson

MOST_BYTES = 1 << 16  # of a body that is read: a longer one is a long prompt, for the large model
CHARACTERS = 2000  # of a prompt, its last ones, from which words are taken
BUCKETS = 256  # for words
MEASURES = 4  # features before the words
_FILE_BYTES = 1 << 20
_TEXTS = ("system", "instructions", "messages", "prompt", "input", "inputs", "content", "text")  # names in APIs' bodies
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


def features(body: dict[str, Any]) -> dict[int, float]:
    """Returns the features of a request, as its client has sent it over any API: values by index, without zeros."""
    text = _prompt(body)
    words = Counter(_WORD.findall(text.lower()))
    total = sum(words.values()) or 1
    found = {
        0: math.log1p(len(text)),
        1: text.count("\n") / total,
        2: (len(text.encode("utf-8", "replace")) - len(text)) / total,
        3: float(bool(body.get("tools"))),
    }
    for word, count in words.items():
        place = MEASURES + crc32(word.encode("utf-8", "replace")) % BUCKETS
        found[place] = found.get(place, 0.0) + math.sqrt(count / total)
    return found


def _prompt(body: dict[str, Any]) -> str:
    """The last characters of all texts of the prompt. The newest message is read first, and the rest is left out."""
    pending: list[Any] = [body]
    texts: list[str] = []
    size = 0
    while pending and size < CHARACTERS:
        value = pending.pop()
        if isinstance(value, str):
            texts.append(value[-CHARACTERS:])
            size += len(texts[-1])
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += [value[name] for name in _TEXTS if name in value]
    return "\n".join(reversed(texts))[-CHARACTERS:]


class Classifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The weights of the regression, as the file has them."""

    format: Literal["penstock-route-1"] = "penstock-route-1"
    bias: float
    weights: list[float]

    def probability(self, found: dict[int, float]) -> float:
        """Returns the probability that the small answer is good enough."""
        weights = self.weights
        logit = self.bias + sum(weights[place] * value for place, value in found.items())
        return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))

    def probability_of(self, body: bytes) -> float:
        """Returns the probability for a request's body; 0 for one that is too long or no JSON object."""
        if len(body) > MOST_BYTES:
            return 0.0
        try:
            request = orjson.loads(body)
        except ValueError:
            return 0.0
        return self.probability(features(request)) if isinstance(request, dict) else 0.0


def read_classifier(path: str, named: str) -> Classifier:
    """Returns the classifier of a file. Raises ValueError; `named` is what errors call it."""
    try:
        with Path(path).open("rb") as file:
            made = msgspec.json.decode(file.read(_FILE_BYTES), type=Classifier)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{named}: {path} cannot be read: {reason}; name a file of penstock route fit") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{named}: {path} has no classifier ({error}); name a file of penstock route fit") from None
    if len(made.weights) != MEASURES + BUCKETS or not all(map(math.isfinite, (made.bias, *made.weights))):
        wanted = f"{MEASURES + BUCKETS} finite weights"
        raise ValueError(f"{named}: {path} needs {wanted}; make it again with penstock route fit")
    return made
