"""The providers file: whose models the server offers, what they cost, and which model answers in another's place."""

import datetime
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, urlsplit

import msgspec

from penstock.config.tenants.entries import FilePart, PriceEntry
from penstock.config.yaml_file import convert_yaml, parse_yaml, read_yaml_text

MAX_BYTES = 1 << 20  # of the file
MAX_KEY_BYTES = 4096
MOST_MODELS = 1000
MOST_PRICE = 1e9  # of a million tokens
MOST_HELD = 4096  # tokens of a small answer
URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com/v1"}
# Abilities that only some servers with OpenAI's API have. `prefix`: they continue a last message of the assistant.
# `completions`: they continue a text, without a chat template.
OPTIONAL = ("prefix", "completions", "top_k", "min_p", "top_n_sigma", "repetition_penalty", "min_tokens", "ignore_eos")


class ModelEntry(FilePart, frozen=True):
    """A model of a provider. Prices are for a million tokens, in the currency of the tenants file."""

    model: str = ""  # its name at the provider; "": as here
    aliases: tuple[str, ...] = ()
    input: float = 0.0
    output: float = 0.0
    cached: float | None = None  # for tokens of prompts that the provider had cached; None: as `input`
    context: int = 131_072  # tokens of prompt and output, as shown to clients
    max_output: int = 4096  # tokens of an answer whose request sets no limit

    @property
    def price(self) -> PriceEntry:
        cached = self.input if self.cached is None else self.cached
        return PriceEntry(since=datetime.date.min, input=self.input, output=self.output, cached=cached)


class ProviderEntry(FilePart, frozen=True):
    """A provider: its API, its address, its key and its limits. Times are in seconds."""

    kind: Literal["openai", "anthropic"] = "openai"  # the API that it speaks
    url: str = ""  # up to and with /v1; "": the company's own
    key_env: str = ""  # the environment variable that has the API key
    key_file: str = ""  # or the file that has it
    region: str = ""  # where it is, for tenants that are bound to regions
    private: bool = False  # the address may be loopback or in a private network, and plain HTTP
    accepts: tuple[str, ...] = ()  # names of OPTIONAL
    timeout: float = 600.0  # for a whole answer
    first_token_timeout: float = 15.0
    idle_timeout: float = 60.0  # between two pieces of an answer
    retries: int = 2  # of one request, before its first token
    retry_seconds: float = 10.0  # after which it is not tried again
    concurrent: int = 64  # requests at once
    models: dict[str, ModelEntry] = msgspec.field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return (self.url or URLS[self.kind]).rstrip("/")

    def key(self) -> str:
        """Returns the API key; "" if the provider needs none. Raises ValueError."""
        if self.key_env:
            key, where = os.environ.get(self.key_env, ""), f"the environment variable {self.key_env}"
        elif self.key_file:
            where = f"the file {self.key_file}"
            try:
                with Path(self.key_file).open(encoding="utf-8") as file:
                    key = file.read(MAX_KEY_BYTES).strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{where} cannot be read: {error}") from None
        else:
            return ""
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError(f"{where} has no key: give it one line of plain characters")
        return key


class RouteEntry(FilePart, frozen=True):
    """A name whose requests go to a small or a large model. At least one of `classifier` and `logprob` is set."""

    small: str
    large: str
    classifier: str = ""  # a file of `penstock route fit`
    probability: float = 0.5  # that the small answer is good enough, by the classifier: below it, the large one answers
    logprob: float | None = None  # mean of the first tokens of the small answer: below it, the large one answers
    tokens: int = 32  # of the small answer, which are held until their log-probabilities decide


class ProvidersFile(FilePart, frozen=True):
    """The whole file."""

    providers: dict[str, ProviderEntry] = msgspec.field(default_factory=dict)
    fallbacks: dict[str, tuple[str, ...]] = msgspec.field(
        default_factory=dict
    )  # by model: those that answer if it cannot, in order
    routes: dict[str, RouteEntry] = msgspec.field(default_factory=dict)


def read_providers(path: Path) -> ProvidersFile:
    """Returns what a providers file says. Raises ValueError that names the file, the place and what is wrong, also for
    a missing key."""
    named = f"--providers {path}"
    content = parse_yaml(read_yaml_text(path, MAX_BYTES, named), named)
    file = convert_yaml(content, ProvidersFile, named)
    for place, wrong in _mistakes(file):
        raise ValueError(f"{named}, at {place}: {wrong}")
    for name, entry in file.providers.items():
        try:
            entry.key()
        except ValueError as error:
            raise ValueError(f"{named}, at providers.{name}: {error}") from None
    return file


def check_names(file: ProvidersFile, names: list[str], named: str) -> None:
    """Raises ValueError if a fallback or a route names a model that is not among `names`, all that the server has."""
    for route, entry in file.routes.items():
        for field, name in (("small", entry.small), ("large", entry.large)):
            if name not in names:
                raise ValueError(
                    f"{named}, at routes.{route}.{field}: there is no model {name!r}; name one that is served"
                )
        if route in names:
            raise ValueError(f"{named}, at routes.{route}: a model has this name; give the route another one")
    for model, others in file.fallbacks.items():
        for name in (model, *others):
            if name not in names:
                raise ValueError(f"{named}, at fallbacks.{model}: there is no model {name!r}; name one that is served")


def _mistakes(file: ProvidersFile) -> Iterator[tuple[str, str]]:
    """Yields what is wrong in a file whose fields have the right types: the place and the error."""
    if sum(len(entry.models) for entry in file.providers.values()) > MOST_MODELS:
        yield "providers", f"there are more than {MOST_MODELS} models; remove some"
    for name, entry in file.providers.items():
        yield from ((f"providers.{name}.{place}", wrong) for place, wrong in _provider_mistakes(entry))
    remote = {
        each
        for entry in file.providers.values()
        for name, model in entry.models.items()
        for each in (name, *model.aliases)
    }
    for name, route in file.routes.items():
        yield from ((f"routes.{name}.{place}", wrong) for place, wrong in _route_mistakes(route, remote))


def _route_mistakes(route: RouteEntry, remote: set[str]) -> Iterator[tuple[str, str]]:
    if route.small == route.large:
        yield "large", f"it is {route.large!r}, as `small` is; name another model"
    if not route.classifier and route.logprob is None:
        yield "classifier", "there is neither a classifier nor a logprob; set one, or both"
    if not 0 <= route.probability <= 1:
        yield "probability", f"it is {route.probability:g}; give a number from 0 to 1"
    if not 1 <= route.tokens <= MOST_HELD:
        yield "tokens", f"it is {route.tokens}; give a number from 1 to {MOST_HELD}"
    if route.logprob is not None and not -100 <= route.logprob <= 0:
        yield "logprob", f"it is {route.logprob:g}; give a number from -100 to 0"
    if route.logprob is not None and route.small in remote:
        wrong = f"{route.small!r} is at a provider, which sends no log-probabilities"
        yield "logprob", f"{wrong}; name a small model of this server, or use a classifier"


def _provider_mistakes(entry: ProviderEntry) -> Iterator[tuple[str, str]]:
    if (url := _split(entry.base_url)) is None:
        yield (
            "url",
            f"it is {entry.url[:200]!r}; give a URL such as https://api.example.com/v1, without a key or a query",
        )
    elif not entry.private and (url.scheme == "http" or is_private(url.hostname or "")):
        yield "url", f"it is {entry.url!r}: plain HTTP or a private address; give an https URL, or set private: true"
    if entry.key_env and entry.key_file:
        yield "key_env", "key_file is set, too; leave one out"
    if entry.kind != "openai" and "completions" in entry.accepts:
        yield "accepts", "'completions' is of OpenAI's API; leave it out, or set kind: openai"
    if unknown := set(entry.accepts) - set(OPTIONAL):
        yield "accepts", f"there is no {min(unknown)!r}; give names of {', '.join(OPTIONAL)}"
    for field in ("timeout", "first_token_timeout", "idle_timeout"):
        if not 0 < getattr(entry, field) <= 86400:
            yield field, f"it is {getattr(entry, field):g}; give a number of seconds above 0, up to 86400"
    for field, least, most in (("retries", 0, 10), ("retry_seconds", 0, 600), ("concurrent", 1, 10_000)):
        if not least <= getattr(entry, field) <= most:
            yield field, f"it is {getattr(entry, field):g}; give a number from {least} to {most}"
    for name, model in entry.models.items():
        if not name or not all(0 <= price <= MOST_PRICE for price in (model.input, model.output, model.cached or 0.0)):
            yield f"models.{name}", f"a price is below 0 or above {MOST_PRICE:g}, or the name is empty; change it"
        if not 1 <= model.max_output <= model.context <= 100_000_000:
            yield f"models.{name}", f"max_output is {model.max_output} and context {model.context}; give the tokens"


def _split(text: str) -> SplitResult | None:
    """The parts of a provider's address; None for another kind of text."""
    try:
        url = urlsplit(text)
        known = url.scheme in ("https", "http") and url.hostname and url.port != 0
    except ValueError:  # of the port, or of brackets
        return None
    return url if known and not (url.query or url.fragment) and url.username is None else None


def is_private(host: str) -> bool:
    """Returns True for an address that is not on the public internet. For a name, returns False: it is looked up when a
    connection is made."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return not (getattr(address, "ipv4_mapped", None) or address).is_global
