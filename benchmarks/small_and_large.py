"""Measures routes between a small and a large model: cost against quality, and the router's own time.

    python benchmarks/small_and_large.py --json benchmarks/results/amx/small_and_large.json
    python benchmarks/small_and_large.py --router-only --json benchmarks/results/amx/router.json

python-8m is the small model and SmolLM2 the large one, both in one server. The prompts are of this project and have
known answers: the next word of lines of our code, and of sentences about capitals, opposites, and what follows in a
series. An answer is right if its first word is the known one. The cost of an answer is 2 x parameters x tokens of
prompt and answer, in GFLOP, so it does not depend on how busy the machine is.

Both models answer all prompts. `penstock route fit` gets every other label, and `evaluate` gets the rest. Then a server
with both kinds of routes answers these, and its answers must be right as often as the table says.

`--router-only` measures decisions alone, with a classifier that has learned to tell code from sentences: no model runs.
"""

import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from results import parser, write
from servers import free_port, running

from penstock.cli.route.evaluate import RouteOutcome, outcomes
from penstock.cli.route.labels import Label, read_labels
from penstock.frontend.providers.difficulty import MOST_BYTES, features, read_classifier
from penstock.frontend.providers.file import RouteEntry
from penstock.frontend.providers.routing import ModelRoute

SMALL, LARGE = "python-8m", "smollm2-135m"
PARAMETERS = {SMALL: 8.4e6, LARGE: 134.5e6}
CODE = 400  # prompts
TOKENS = 6  # of an answer
WORD = re.compile(r"\w+|[^\w\s]+")
SOURCE = Path(__file__).parent.parent / "src" / "penstock"
CAPITALS = (
    "France Paris,Germany Berlin,Italy Rome,Spain Madrid,Russia Moscow,Japan Tokyo,China Beijing,Egypt Cairo,"
    "Greece Athens,Austria Vienna,Portugal Lisbon,Poland Warsaw,Norway Oslo,Sweden Stockholm,Finland Helsinki,"
    "Ireland Dublin,Cuba Havana,Canada Ottawa,Turkey Ankara,Iran Tehran,Iraq Baghdad,Kenya Nairobi,Peru Lima,"
    "Hungary Budapest,Denmark Copenhagen,Belgium Brussels,Thailand Bangkok,Syria Damascus,Ukraine Kyiv,"
    "Bulgaria Sofia"
)
OPPOSITES = (
    "hot cold,big small,tall short,fast slow,light dark,old new,young old,good bad,happy sad,early late,"
    "rich poor,up down,left right,open closed,full empty,hard soft,wet dry,first last,true false,near far,"
    "high low,strong weak,in out,day night,black white,love hate,win lose,push pull,buy sell,begin end"
)
SERIES = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "one two three four five six seven eight nine ten eleven twelve",
    "first second third fourth fifth sixth seventh eighth",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
)


def sentences() -> Iterator[tuple[str, str]]:
    for pair in CAPITALS.split(","):
        country, capital = pair.split()
        yield f"The capital of {country} is the city of", capital
        yield f"Question: Which city is the capital of {country}?\nAnswer: The capital is", capital
    for pair in OPPOSITES.split(","):
        word, opposite = pair.split()
        yield f'The opposite of "hello" is "goodbye", and the opposite of "{word}" is "', opposite
        yield f"Give the opposite of each word.\nyes: no\nleft: right\n{word}:", opposite
    for words in map(str.split, SERIES):
        for i in range(3, len(words)):
            yield f"{', '.join(words[i - 3 : i])},", words[i]
            yield f"In the series, {words[i - 2]} comes before {words[i - 1]}, and after {words[i - 1]} comes", words[i]


def lines_of_code(count: int, drawn: random.Random) -> Iterator[tuple[str, str]]:
    """Code up to a word in the middle of a line, and this word."""
    files = sorted(SOURCE.rglob("*.py"))
    while count:
        lines = drawn.choice(files).read_text().splitlines()
        number = drawn.randrange(len(lines)) if lines else 0
        words = list(WORD.finditer(lines[number])) if number > 8 else []
        if len(words) < 4:
            continue
        word = words[drawn.randrange(2, len(words))]
        yield "\n".join((*lines[number - 8 : number], lines[number][: word.start()].rstrip(" "))), word[0]
        count -= 1


def answer(client: httpx.Client, model: str, prompt: str) -> tuple[str, str, float, float]:
    """Returns (model that answered, first word, cost, mean log-probability)."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    reply = client.post("/v1/completions", json=body)
    reply.raise_for_status()
    made = reply.json()
    choice, by = made["choices"][0], LARGE if made["model"].startswith("smollm2") else SMALL
    word = WORD.search(choice["text"])
    logprobs = choice["logprobs"]["token_logprobs"]
    cost = 2e-9 * PARAMETERS[by] * made["usage"]["total_tokens"]
    return by, "" if word is None else word[0], cost, statistics.mean(logprobs) if logprobs else 0.0


@contextlib.contextmanager
def server(folder: Path, *more: str) -> Iterator[httpx.Client]:
    """A server with both models, which are loaded."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", "--repository", str(folder / "models"), "--port", str(port)]
    load = ("--load-model", SMALL, "--load-model", LARGE, "--state-dir", "none")
    with running([*command, *load, *more], port) as (client, _):
        yield client


def label(client: httpx.Client, prompt: str, known: str) -> dict[str, Any]:
    found: dict[str, Any] = {"request": {"model": "auto", "prompt": prompt, "max_tokens": TOKENS}}
    for name, model in (("small", SMALL), ("large", LARGE)):
        _, word, cost, logprob = answer(client, model, prompt)
        found |= {name: float(word.lower() == known.lower()), f"{name}_cost": cost}
        found |= {"logprob": logprob} if model == SMALL else {}
    return found


def served(client: httpx.Client, route: str, pairs: Sequence[tuple[str, str]], small_costs: Sequence[float]) -> Any:
    """The means of answers through a route of the server."""
    right = large = 0
    cost = 0.0
    for (prompt, known), small_cost in zip(pairs, small_costs, strict=True):
        by, word, spent, _ = answer(client, route, prompt)
        right += word.lower() == known.lower()
        large += by == LARGE
        cost += spent + (small_cost if by == LARGE and route == "cascade" else 0.0)
    return {"large": large / len(pairs), "cost": cost / len(pairs), "quality": right / len(pairs)}


def router_times(classifier: Path, labels: Sequence[Label]) -> dict[str, float]:
    """Microseconds of processor time of decisions, and by the clock: for the labels' requests, and for bodies of the
    most that is read. On a busy machine the clock's are those of other programs, too."""
    route = ModelRoute(RouteEntry(small=SMALL, large=LARGE, classifier=str(classifier)), "classifier")
    bodies = [json.dumps(each.request).encode() for each in labels]
    long = json.dumps({"prompt": "\n".join(json.loads(body)["prompt"] for body in bodies)}).encode()[: MOST_BYTES - 2]
    found = {}
    for name, sent in (("short", bodies), ("longest", [long.rstrip(b"\\") + b'"}'] * 200)):
        found[f"{name}_bytes"] = statistics.mean(map(len, sent))
        for kind, clock in (("cpu", time.thread_time), ("clock", time.perf_counter)):
            times = []
            for body in sent * (5000 // len(sent)):
                start = clock()
                route.choose(body)
                times.append((clock() - start) * 1e6)
            times.sort()
            found |= {f"{name}_{kind}_p50_us": times[len(times) // 2]}
            found |= {f"{name}_{kind}_p99_us": times[len(times) * 99 // 100]}
    return found


def router_only(code: Sequence[tuple[str, str]], texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """What `router_times` gives, with labels that need no answers."""
    rows = [({"prompt": prompt}, small) for small, pairs in ((1, code), (0, texts)) for prompt, _ in pairs]
    with tempfile.TemporaryDirectory() as folder:
        labels, made = Path(folder) / "labels.jsonl", Path(folder) / "route.json"
        lines = (json.dumps({"request": request, "small": small, "large": 1}) for request, small in rows)
        labels.write_text("\n".join(lines))
        command = [sys.executable, "-m", "penstock", "route", "fit", str(labels), "--out", str(made)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return router_times(made, read_labels(str(labels)))


def nearest(found: Sequence[RouteOutcome], kind: str) -> RouteOutcome:
    """The outcome of a kind with about half of the requests at the large model."""
    return min((each for each in found if each.way.startswith(kind)), key=lambda each: abs(each.large - 0.5))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--labels", type=Path, metavar="FOLDER", help="keep the labels and the classifier here")
    options.add_argument("--router-only", action="store_true", help="measure only the router's own time")
    given = options.parse_args()
    drawn = random.Random(1)
    code, texts = list(lines_of_code(CODE, drawn)), list(sentences())
    if given.router_only:
        write({"benchmark": "router", **router_only(code, texts)}, given.json)
        return
    pairs = [*code, *texts]
    drawn.shuffle(pairs)
    with tempfile.TemporaryDirectory() as made:
        folder = given.labels or Path(made)
        for model in (SMALL, LARGE):
            (folder / "models" / model).mkdir(parents=True, exist_ok=True)
            settings = {"model": model, "settings": {"kv-cache-memory": "64MiB", "max-model-len": 1024}}
            (folder / "models" / model / "model.yaml").write_text(json.dumps(settings))
        with server(folder) as client:
            rows = [label(client, *pair) for pair in pairs]
        for name, part in (("fitted", rows[::2]), ("judged", rows[1::2])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        command = [sys.executable, "-m", "penstock", "route"]
        classifier = folder / "route.json"
        fitted = subprocess.run(
            [*command, "fit", str(folder / "fitted.jsonl"), "--out", str(classifier)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        labels, read = read_labels(str(folder / "judged.jsonl")), read_classifier(str(classifier), "classifier")
        found = list(outcomes(labels, [read.probability(features(each.request)) for each in labels]))
        probability, logprob = (float(nearest(found, kind).way.split()[1]) for kind in ("probability", "logprob"))
        both = {"small": SMALL, "large": LARGE}
        routes = {
            "classifier": {**both, "classifier": str(classifier), "probability": probability},
            "cascade": {**both, "logprob": logprob},
        }
        (folder / "providers.yaml").write_text(json.dumps({"routes": routes}))
        costs = [each.small_cost for each in labels]
        with server(folder, "--providers", str(folder / "providers.yaml")) as client:
            through = {route: served(client, route, pairs[1::2], costs) for route in routes}
        result = {
            "benchmark": "small_and_large",
            "prompts": len(pairs),
            "judged": len(labels),
            "fit": fitted.splitlines(),
            "outcomes": [each._asdict() for each in found],
            "served": through,
            "router": router_times(classifier, labels),
        }
    write(result, given.json)


if __name__ == "__main__":
    main()
