"""Implements `penstock detect`, which looks for a server's watermark in a text."""

import sys
from pathlib import Path

from penstock.cli.options import Flags
from penstock.cli.output import write_json
from penstock.prepare.files import check_file
from penstock.prepare.model import find_given, read_given
from penstock.runtime.sampling.watermark import CONTEXT, Evidence, Watermark, detect
from penstock.text import Tokenizer

MAX_BYTES = 4 << 20  # of a text
CERTAIN, LIKELY = 1e-4, 1e-2  # p-values below which a text is reported as marked, or as perhaps marked


def detect_watermark(source: str, model: str | None, json_file: str | None, flags: Flags) -> int:
    """Prints the evidence for each scheme, or for the one that was given. Returns 0 if the text is marked, else 1.

    `source` is a text, a file, or - for standard input. Raises ValueError for one that cannot be read, and ConfigError.
    """
    check_file("--json", json_file)
    given = read_given(model, flags)
    secret, scheme = given.settings.watermark_key, given.settings.watermark
    if not secret:
        raise ValueError("there is no key: set PENSTOCK_WATERMARK_KEY to that of the server")
    if scheme == "none":
        raise ValueError("--watermark is none: give green-list or gumbel, or leave it out to look for both")
    text = _read(source)
    tokenizer = Tokenizer.load(find_given(given, weights=False).path)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found = {}
    for name in [scheme] if scheme else CONTEXT:
        evidence = detect(Watermark.of(name, secret), token_ids)  # type: ignore[arg-type]
        found[name] = evidence
        print(f"{name}: {_in_words(name, evidence)}")
    schemes = {name: evidence._asdict() for name, evidence in found.items()}
    write_json(json_file, {"tokens": len(token_ids), "schemes": schemes})
    best = min(evidence.p for evidence in found.values()) * len(found)  # corrected for testing several schemes
    if best < CERTAIN:
        print("The text has the watermark of this key.")
    elif best < LIKELY:
        print("The text may have the watermark of this key; a longer part of it would decide.")
    else:
        print("There is no sign of the watermark of this key.")
    return 0 if best < CERTAIN else 1


def _read(source: str) -> str:
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        elif _is_file(source):
            with open(source, "rb") as file:
                data = file.read(MAX_BYTES + 1)
        else:
            data = source.encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"the text has more than {MAX_BYTES} bytes, which is the limit; give a part of it")
        text = data.decode()
    except OSError as error:
        raise ValueError(f"{source[:200]!r} cannot be read: {str(error.strerror).lower()}; name a file") from None
    except UnicodeError:
        raise ValueError(f"{source[:200]!r} is not a text in UTF-8; convert it") from None
    if not text.strip():
        raise ValueError(f"{source[:200]!r} has no text; give a text, a file, or - for standard input")
    return text


def _is_file(source: str) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # a text is too long for a name, or has a zero byte
        return False


def _in_words(scheme: str, evidence: Evidence) -> str:
    if not evidence.tokens:
        return "the text is too short"
    share = evidence.score / evidence.tokens
    what = f"{share:.0%} are green, 25%" if scheme == "green-list" else f"the mean score is {share:.2f}, 1.00"
    z = f"z = {evidence.z:.1f}, p = {evidence.p:.2g}"
    return f"of {evidence.tokens} tokens that count, {what} without a watermark: {z}"
