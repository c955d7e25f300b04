"""Texts that every machine has, for calibration and for measuring: Python's help texts and sources, sums and JSON.

Calibration and measurement use different parts. The sums and the JSON are drawn at random, always the same.
"""

import json
import random
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

_CALIBRATION_SOURCES = ("tarfile.py", "asyncio/base_events.py", "statistics.py", "zipfile/__init__.py", "ipaddress.py")
_SOURCES = ("argparse.py", "textwrap.py", "csv.py", "logging/handlers.py", "configparser.py")
_NAMES = ("Amelia", "Bogdan", "Chen", "Dalila", "Emeka", "Freya", "Goran", "Hina", "Ines", "Jakub", "Kofi", "Lena")
_PLACES = ("Accra", "Bergen", "Cusco", "Delft", "Esfahan", "Fukuoka", "Gdansk", "Hobart", "Izmir", "Jaipur")
_SIZE = 60_000  # characters of a text that is drawn


def help_texts() -> list[str]:
    """Returns the help texts that come with Python, in English. Raises ValueError if it was installed without."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no pydoc_data.topics, the default text: name a file of text") from None
    return [topics[name] for name in sorted(topics)]


def class_texts(*, calibration: bool = False) -> Mapping[str, Callable[[], str]]:
    """Returns the classes of text: prose, code, arithmetic and JSON, each with a function that gives the text. Those of
    calibration are others than those of measurement. Each may raise ValueError."""
    seed = 1 if calibration else 2
    sources = _CALIBRATION_SOURCES if calibration else _SOURCES
    return MappingProxyType(
        {
            "prose": lambda: _prose(calibration=calibration),
            "code": lambda: _code(sources),
            "arithmetic": lambda: _arithmetic(random.Random(seed)),
            "JSON": lambda: _json(random.Random(seed)),
        }
    )


def _prose(*, calibration: bool) -> str:
    """Help texts: the first third measures, the last third calibrates, each in its order."""
    texts = help_texts()
    third = len(texts) // 3
    return "\n\n".join(texts[-third:] if calibration else texts[:third])


def _code(names: tuple[str, ...]) -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    found = [path.read_text(encoding="utf-8") for name in names if (path := folder / name).is_file()]
    if not found:
        raise ValueError(f"this Python has no sources in {folder}: name a file of text")
    return "\n\n".join(found)


def _arithmetic(draw: random.Random) -> str:
    lines, size = [], 0
    while size < _SIZE:
        a, b, c = draw.randrange(2, 100), draw.randrange(2, 100), draw.randrange(2, 20)
        name, other = draw.sample(_NAMES, 2)
        line = draw.choice(
            (
                f"{a} + {b} = {a + b}",
                f"{a} * {c} = {a * c}",
                f"{a + b} - {a} = {b}",
                f"{name} has {a} apples and gets {b} from {other}. Now {name} has {a} + {b} = {a + b} apples.",
                f"A box holds {c} pens. {a} boxes hold {a} * {c} = {a * c} pens.",
                f"{a * c} divided by {c} is {a}, because {a} * {c} = {a * c}.",
            )
        )
        lines.append(line)
        size += len(line) + 1
    return "\n".join(lines)


def _json(draw: random.Random) -> str:
    documents, size = [], 0
    while size < _SIZE:
        people = [
            {"name": draw.choice(_NAMES), "age": draw.randrange(18, 90), "city": draw.choice(_PLACES)}
            for _ in range(draw.randrange(1, 4))
        ]
        order = {
            "id": draw.randrange(10_000),
            "paid": draw.random() < 0.5,
            "total": draw.randrange(100, 100_000) / 100,
            "people": people,
            "tags": draw.sample(("new", "large", "fragile", "express", "gift"), 2),
        }
        text = json.dumps(order, indent=draw.choice((None, 2)))
        documents.append(text)
        size += len(text) + 1
    return "\n".join(documents)
