"""Which grammars are accepted, what they accept, and that hostile ones are stopped."""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from penstock.messages import GRAMMAR_TOO_COMPLEX, Grammar
from penstock.text import GrammarChecker, GrammarError
from penstock.text.grammars.answers import ByteTokens, check
from penstock.text.grammars.compile import compile_grammar
from penstock.text.grammars.matchers import GrammarMatchers
from penstock.text.grammars.questions import DEADLINE, Setup, Source
from tests.bounded_schemas import bounded_schemas
from tests.patience import AT_ONCE

SUITE = "JSON_SCHEMA_TEST_SUITE"
INSTALL = (
    "the JSON Schema Test Suite is missing: pip download --no-deps --no-binary :all: jsonschema, unpack it, and set "
    f"{SUITE} to its folder json/"
)
END = 256


class Machine:
    """Decides by llguidance whether a text matches a grammar."""

    def __init__(self) -> None:
        from llguidance import LLTokenizer

        self.tokens: Any = ByteTokens(Setup(258, END, {END: "<|end|>", 257: "<|call|>"}))
        self.tokenizer = LLTokenizer(self.tokens, eos_token=[END])

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = compile_grammar(self.tokenizer, grammar)
        ids = list(text.encode())
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def read(self, schema: Any) -> Grammar:
        return check(self.tokenizer, Source("json_schema", json.dumps(schema)), self.tokens)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine()


class Words:
    """What GrammarChecker and GrammarMatchers need of a Tokenizer: bytes, two special tokens, and a few words."""

    vocab_size = 262
    special_ids = frozenset((END, 257))
    words = (b"<tool>", b"<tool>x", b"ol>", b"ol>y")

    def token(self, token_id: int) -> str:
        return {END: "<|end|>", 257: "<|call|>"}[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return self.token(token_id).encode()
        return bytes([token_id]) if token_id < END else self.words[token_id - 258]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


class Checks:
    """A GrammarChecker for tests without an event loop."""

    def __init__(self) -> None:
        self.checker = GrammarChecker(Words(), 262, [END])  # type: ignore[arg-type]
        self._runner = asyncio.Runner()

    def check(self, kind: Any, text: str) -> Grammar:
        return self._runner.run(self.checker.check(kind, text))

    def close(self) -> None:
        self.checker.close()
        self._runner.close()


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    made = Checks()
    yield made
    made.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name"],
    "additionalProperties": False,
}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (PERSON, ['{"name":"Al"}', '{"name": "Al", "age": 5}', '{\n  "name": "Al"\n}'], ['{"name":"A"}', "{}", "[]"]),
    (
        PERSON,
        [],
        ['{"name":"Al","age":121}', '{"name":"Al","x":1}', '{"age":5,"name":"Al"}', '{"name":"Al"', '{"name":'],
    ),
    (
        PERSON,
        [],
        ['{"name":  "Al"}', '{\n\n"name":"Al"}', ' {"name":"Al"}', '{"name":"Al"} '],
    ),  # white space is bounded
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}, ["[[],[[]]]"], ["[1]"]),
    ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, ['"abc"'], ['"abca"', '"d"', '""']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"', '"x"']),
    ({"type": "string", "format": "of-my-own", "title": "T", "uniqueItems": False}, ['"anything"'], ["1"]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
    ({"anyOf": [{"const": 1}, {"enum": ["é", [1, None]]}]}, ["1", '"é"', "[1,null]"], ["2", '"e"', "[1]"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}, {"multipleOf": 2}]}, ["4", "100"], ["2", "5", "4.5"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1}, ["[1]"], ["[]", "[1,2]"]),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "maxProperties": 1},
        ['{"x":null}'],
        ['{"x":1}'],
    ),
    (True, ["1", '{"a":[]}'], ["{", "tru"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_a_schema_accepts_and_rejects(machine: Machine, schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = machine.read(schema)
    assert [text for text in right if not machine.accepts(grammar, text)] == []
    assert [text for text in wrong if machine.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (
            {"properties": {"a": {"type": "strng"}}},
            "the type at /properties/a/type is 'strng'; it must be one of array, ",
        ),
        ({"anyOf": [{"type": ["null", 7]}]}, "the type at /anyOf/0/type is a number"),
        ({"properties": {"a": {"not": {}}}}, "'not' at /properties/a/not"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' at /uniqueItems"),
        ({"anyOf": [{"if": {}}]}, "'if' at /anyOf/0/if"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf'"),
        ({"$ref": "http://example.com/schema"}, "'$ref' at /$ref"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"items": [{}]}, "'prefixItems'"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "minLength": "x"}, "/minLength is a string; it must be a whole number, 0 or more"),
        ({"type": "array", "maxItems": -1}, "/maxItems is -1; it must be a whole number, 0 or more"),
        ({"type": "array", "maxItems": 1.5}, "/maxItems is 1.5; it must be a whole number, 0 or more"),
        ({"type": "number", "maximum": None}, "/maximum is null; it must be a number"),
        ({"type": "number", "multipleOf": 0}, "/multipleOf is 0; it must be a number above 0"),
        ({"type": "object", "required": None}, "/required is null; it must be a list of names"),
        ({"type": "object", "required": [["a"]]}, "/required/0 is a list; it must be a string"),
        ({"enum": {"a": 1}}, "/enum is an object; it must be a list of values"),
        ({"type": "string", "pattern": 3}, "/pattern is a number; it must be a string"),
        ({"properties": 3}, "/properties is a number"),
        ({"$ref": "#"}, "no text satisfies it"),
        ({"type": "nothing"}, "nothing"),
        ([], "the schema is a list"),
    ],
)
def test_what_cannot_be_held_is_named(machine: Machine, schema: Any, named: str) -> None:
    with pytest.raises(GrammarError) as caught:
        machine.read(schema)
    assert named in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


LISTS = ["[]", "[1]", "[1,2]", "[1,2,3]"]
OBJECTS = ["{}", '{"a":1}', '{"a":1,"b":2}', '{"a":1,"b":2,"c":3}']
TEXTS = ['""', '"a"', '"ab"', '"abc"']
INTEGERS, NUMBERS = ["1", "2", "3", "4"], ["1", "1.5", "2", "2.5", "3"]
WHOLE = [
    *(("string", key, TEXTS) for key in ("minLength", "maxLength")),
    *(("array", key, LISTS) for key in ("minItems", "maxItems")),
    *(("object", key, OBJECTS) for key in ("minProperties", "maxProperties")),
    *(
        (kind, key, texts)
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        for kind, texts in (("integer", INTEGERS), ("number", NUMBERS))
    ),
]


@pytest.mark.parametrize(("kind", "key", "texts"), WHOLE)
@pytest.mark.parametrize("number", ["2.0", "0.2e1", "2"])
def test_whole_numbers_may_be_written_as_floats(
    machine: Machine, kind: str, key: str, texts: list[str], number: str
) -> None:
    schema = json.loads(f'{{"type":"{kind}","{key}":{number}}}')
    grammar = machine.read(schema)
    for text in texts:
        assert machine.accepts(grammar, text) == Draft202012Validator(schema).is_valid(json.loads(text)), text


def test_what_a_schema_says_of_itself_is_no_keyword(machine: Machine) -> None:
    """Names of properties and values of enum are the user's own."""
    schema = {"properties": {"not": {"type": "integer"}, "if": {"const": {"uniqueItems": True}}}, "required": ["not"]}
    assert machine.accepts(machine.read(schema), '{"not":1,"if":{"uniqueItems":true}}')


def test_a_limit_of_the_library_is_the_grammars_fault() -> None:
    """Not the server's: the status is 400."""
    matchers = GrammarMatchers(Words, 262, [END], threads=1)  # type: ignore[arg-type]
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    matcher = matchers.matcher(Grammar("json_schema", json.dumps(schema)), list(b"{"))
    assert matcher.error.startswith(GRAMMAR_TOO_COMPLEX)  # for its items, or for its time on a slow machine
    matcher = matchers.matcher(Grammar("json_schema", "{}"), list(b"x"))
    assert "cannot be followed beyond token 120" in matcher.error


def nested(levels: int) -> Any:
    return {} if not levels else {"items": nested(levels - 1)}


HOSTILE: dict[str, Any] = {
    "intersections of patterns": {"allOf": [{"type": "string", "pattern": f".*x{i}.*y{i}.*"} for i in range(50)]},
    "a product of choices": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(2)]} for i in range(20)]
    },
    "a huge enum": {"enum": [{"a": [i, {"b": i}]} for i in range(4000)]},
    "deep": nested(100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_stopped(checks: Checks, name: str) -> None:
    checks.check("regex", "a")  # the process is started
    began = time.monotonic()
    with pytest.raises(GrammarError, match=r"takes more than 0.7 s|too large|has \d+ bytes|more than \d+"):
        checks.check("json_schema", json.dumps(HOSTILE[name]))
    assert time.monotonic() - began < AT_ONCE
    assert checks.check("regex", "ab").text == "ab", "the next one is checked"


def test_references_that_multiply_are_no_work(checks: Checks) -> None:
    """A tree of 2^30 nodes, and a chain of a thousand references."""
    tree: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
    for definitions in (tree, chain):
        last = {f"d{len(definitions)}": {"type": "integer"}}
        checks.check("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | last}))


async def test_the_event_loop_runs_on(checks: Checks) -> None:
    """While a grammar is compiled until its deadline. A busy machine stops this process for a while, but seldom in each
    of several tries."""
    gaps = []
    for number in range(4):
        text = json.dumps(HOSTILE["intersections of patterns"] | {"title": f"once more: {number}"})
        gaps.append(await longest_gap(checks.checker.check("json_schema", text)))
        if gaps[-1] < 0.2:
            return
    raise AssertionError(f"the loop stood still for {gaps} s")


async def longest_gap(check: Awaitable[object]) -> float:
    """The longest time in seconds in which the event loop ran nothing else, until the check has failed."""
    longest, last = 0.0, time.monotonic()
    checking = asyncio.ensure_future(check)
    while not checking.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    with pytest.raises(GrammarError, match=f"{DEADLINE} s"):
        await checking
    return longest


def test_answers_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.text.grammars.checker.CACHE_BYTES", 20_000)
    made = Checks()
    try:
        for i in range(30):
            made.check("regex", "a" * 100 + str(i))
        assert made.checker.known("regex", "a" * 100 + "29") is not None
        assert made.checker.known("regex", "a" * 100 + "0") is None
        with pytest.raises(GrammarError):
            made.check("regex", "(")
        with pytest.raises(GrammarError):
            made.checker.known("regex", "(")
    finally:
        made.close()


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("choice", '["yes", "no \\"way\\"", "é"]', ["yes", 'no "way"', "é"], ["no", "ye"]),
        ("regex", "[0-9]{3}-(a|b)", ["123-a"], ["123-", "12-a"]),
        ("grammar", 'root ::= "a" ("b" | "c")+', ["abc"], ["a", "b"]),
        ("grammar", 'start: "a" %json {"type": "integer"} "!"', ["a12!"], ["a!"]),
    ],
)
def test_other_grammars(
    checks: Checks, machine: Machine, kind: Any, text: str, right: list[str], wrong: list[str]
) -> None:
    grammar = checks.check(kind, text)
    assert all(machine.accepts(grammar, each) for each in right)
    assert not any(machine.accepts(grammar, each) for each in wrong)


def test_a_trigger_ends_where_the_grammar_begins() -> None:
    """No token may complete the trigger and go on."""
    matchers = GrammarMatchers(Words, 262, [END], threads=1)  # type: ignore[arg-type]
    x, y = 259, 261  # "<tool>x" and "ol>y"

    def allowed(output: list[int]) -> set[int]:
        matcher, words = matchers.matcher(Grammar("regex", "[a-c]+", "<tool>"), output), np.zeros((1, 9), np.int32)
        if matcher.free(0):
            return set(range(262))
        matchers.fill([(matcher, ())], words)
        return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()) & set(range(262))

    everything = set(range(262))
    assert allowed([]) == everything - {x}
    assert allowed(list(b"<to")) == everything - {x, y}
    assert allowed(list(b"<to+")) == everything - {x}
    assert allowed([*b"free <to", 260]) == allowed([258]) == set(b"abc")
    assert allowed([*b"<tool>ab"]) == {*b"abc", END}
    assert allowed([*b"<tool>ab", END]) == everything


@pytest.mark.parametrize("trigger", ["", "<to"])
def test_masks_after_drafts_are_those_after_tokens(trigger: str) -> None:
    """Up to a draft that is not allowed, and beyond the end."""
    matchers = GrammarMatchers(Words, 262, [END], threads=2)  # type: ignore[arg-type]
    grammar = Grammar("regex", "[a-c]{2,4}x?", trigger)
    texts = [[*b"x <toabc"], [*b"<tobbx", END, 7], [*b"aa"], [*b"<to>ab"], [*b"ab<tob"], [*b"a"], [*b"b"]]
    wanted = [(matchers.matcher(grammar, text[:1]), text[1:]) for text in texts]
    errors = [matcher.error for matcher, _ in wanted]
    words = np.full((sum(map(len, texts)), 9), -1, np.int32)
    matchers.fill(wanted, words)
    line = 0
    for text in texts:
        one, after = np.full((1, 9), -1, np.int32), matchers.matcher(grammar, text[:1])
        for i in range(1, len(text) + 1):
            if after.error:
                break
            one[:] = -1
            if not after.free(0):
                matchers.fill([(after, ())], one)
            assert (words[line + i - 1] == one[0]).all(), (text, i)
            after.take(text[i : i + 1])
        line += len(text)
    assert [matcher.error for matcher, _ in wanted] == errors, "drafts leave a matcher where it was"


def test_of_500_schemas_each_is_held_or_refused_by_its_keyword(machine: Machine) -> None:
    held = refused = 0
    for schema, unsupported in bounded_schemas(500):
        if unsupported:
            with pytest.raises(GrammarError, match=f"the keyword {re.escape(repr(unsupported))} at "):
                machine.read(schema)
            refused += 1
        else:
            machine.read(schema)
            held += 1
    assert held > 400 and refused > 80 and held + refused == 500


def reordered(value: Any) -> list[str]:
    """An instance with its properties in every order."""
    if not isinstance(value, dict) or len(value) > 4:
        return [json.dumps(value, ensure_ascii=False)]
    return [json.dumps(dict(order), ensure_ascii=False) for order in permutations(value.items())]


def has_whole_float(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_whole_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and value.is_integer()


def test_accepted_schemas_decide_as_the_suite_says(machine: Machine) -> None:
    """No invalid instance is accepted. Three kinds of valid ones are not written: properties in another order than the
    schema's, whole numbers as 1.0, and texts that break a `format`, which the suite takes for a remark."""
    folder = Path(os.environ.get(SUITE, "")) / "tests" / "draft2020-12"
    if not os.environ.get(SUITE) or not folder.is_dir():
        pytest.skip(INSTALL)
    accepted = 0
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text()):
            try:
                grammar = machine.read(case["schema"])
            except GrammarError:
                continue
            accepted += 1
            for test in case["tests"]:
                where = (file.stem, case["description"], test["description"])
                texts = reordered(test["data"])
                given = any(machine.accepts(grammar, text) for text in texts)
                if not test["valid"]:
                    assert not given, where
                elif file.stem != "format" and not has_whole_float(test["data"]):
                    assert given, where
    assert accepted > 150


@pytest.mark.parametrize(
    ("expression", "taken", "refused"),
    [
        (r"\d{2}", ["12"], ["٣٣", "1"]),
        (r"[\d.]+", ["1.2"], ["1.٣", "d"]),
        (r"\w\D", ["üx"], ["ü1"]),
        (r"\\d", [r"\d"], ["1"]),
    ],
)
def test_digits_in_an_expression_are_0_to_9(
    machine: Machine, expression: str, taken: list[str], refused: list[str]
) -> None:
    grammar = Grammar("regex", expression, None)
    assert [machine.accepts(grammar, text) for text in taken + refused] == [True] * len(taken) + [False] * len(refused)
