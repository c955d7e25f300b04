"""llguidance accepts what a model should write, and nothing that the parser or a tool could not take."""

import json
import random
from collections.abc import Mapping

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.text.calls import REASONING_FORMATS, TOOL_FORMATS, MessageParser
from penstock.text.calls.formats import TaggedArguments
from penstock.text.calls.grammar import ToolGrammar, grammar_for
from penstock.text.calls.writing import WrittenCall, write_calls
from tests.text.calls.messages import SCHEMAS, Case, Message, read

MARKERS = sorted({marker for item in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values()) for marker in item.markers})
SEEDS = 20
EOS = "<|end of text|>"
WEATHER = WrittenCall("get_weather", {"city": "Köln 🌧", "days": 2})
NOW = WrittenCall("now", {})


class Vocabulary:
    """One token for each byte, and for each marker if `special`."""

    def __init__(self, *, special: bool) -> None:
        backend = Backend(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        names = [text for text in MARKERS if special and text[:2] in ("<|", "<｜", "[T", "[A", "[C", "[/")]
        backend.add_tokens([AddedToken(text, special=True) for text in (EOS, *names)])
        self.backend = backend
        self.special = {text: backend.token_to_id(text) for text in names}
        self.eos = backend.token_to_id(EOS)
        self.library = LLTokenizer(backend.to_str(), eos_token=self.eos)

    def matcher(self, grammar: ToolGrammar) -> LLMatcher:
        matcher = LLMatcher(self.library, grammar.text, log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar.text}"
        return matcher

    def accepts(self, grammar: ToolGrammar, text: str) -> bool:
        """True if this is a whole text of the grammar, behind the trigger if there is one."""
        _, trigger, rest = text.partition(grammar.trigger) if grammar.trigger else ("", "", text)
        if grammar.trigger and not trigger:
            return True
        ids = self.backend.encode(rest, add_special_tokens=False).ids
        matcher = self.matcher(grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special_tokens"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(special=request.param)


def start_of(name: str) -> str:
    return "<|start|>assistant" if name == "harmony" else ""


def made(vocabulary: Vocabulary, name: str, **options: object) -> ToolGrammar:
    reasoning = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    options = {"required": True, "prompt_end": start_of(name), **options}
    return grammar_for(TOOL_FORMATS[name], reasoning, SCHEMAS, special=vocabulary.special, **options)  # type: ignore


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls(name: str, required: bool, vocabulary: Vocabulary) -> None:
    format = TOOL_FORMATS[name]
    grammar = made(vocabulary, name, required=required)
    single = write_calls(format, [WEATHER])
    texts = [single, write_calls(format, [NOW])]
    if name != "harmony":
        if name != "json":  # the model ends the message after a call
            texts.append(write_calls(format, [WEATHER, NOW]))
        texts += [f"<think>Köln < 3</think>\n\n{text}" for text in texts]
        one = made(vocabulary, name, required=required, parallel=False)
        assert vocabulary.accepts(one, single)
        assert not vocabulary.accepts(one, write_calls(format, [WEATHER, NOW]))
    for text in texts:
        assert vocabulary.accepts(grammar, text), text
    wrong = {
        "wrong type": single.replace("2", "two"),
        "unknown argument": single.replace("days", "weeks"),
        "unknown tool": single.replace("get_weather", "get_wether"),
        "cut": single[: single.index("days")],
    }
    for what, text in wrong.items():
        assert text != single
        assert not vocabulary.accepts(grammar, text), what
    plain = "<|channel|>final<|message|>Just text <3" if name == "harmony" else 'Just text: <3 {"a": [1]}'
    assert vocabulary.accepts(grammar, plain) is not required


TAGGED = {
    name: item.body for name, item in TOOL_FORMATS.items() if isinstance(getattr(item, "body", None), TaggedArguments)
}


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_contains_its_closing_tag(name: str, vocabulary: Vocabulary) -> None:
    tags, format = TAGGED[name], TOOL_FORMATS[name]
    for city in (f"see {tags.value_close} tag", f"{tags.opening('x')}1{tags.value_close}\nend", f"a{tags.value_close}"):
        for arguments in ({"city": city, "days": 2}, {"city": city}):
            text = write_calls(format, [WrittenCall("get_weather", arguments)])
            assert vocabulary.accepts(made(vocabulary, name), text), text
            ((_, read_arguments),) = read(Case(name, "", text, Message()), []).calls
            assert json.loads(read_arguments) == arguments


def test_the_rules_of_many_arguments_are_short() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(2000)}
    grammar = grammar_for(TOOL_FORMATS["qwen3-coder"], None, {"f": {"properties": properties}}, required=True)
    assert len(grammar.text) < 2000 * 1000


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_reasoning_that_the_prompt_begins(name: str, vocabulary: Vocabulary) -> None:
    if name == "harmony":
        grammar = made(vocabulary, name)
        thoughts = "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant"
    else:
        grammar = made(vocabulary, name, prompt_end="<think>\n")
        thoughts = "I call <x>.\n</think>\n\n"
        assert not vocabulary.accepts(grammar, write_calls(TOOL_FORMATS[name], [NOW]))
    assert vocabulary.accepts(grammar, thoughts + write_calls(TOOL_FORMATS[name], [NOW]))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_with_a_schema(name: str, vocabulary: Vocabulary) -> None:
    grammar = made(vocabulary, name, required=False, answer='{"type": "array", "items": {"type": "integer"}}')
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert vocabulary.accepts(grammar, write_calls(TOOL_FORMATS[name], [WEATHER]))
    assert vocabulary.accepts(grammar, head + "[1, 2]")
    assert not vocabulary.accepts(grammar, head + "one, two")


BOUNDED: Mapping[str, Mapping[str, object]] = {
    "search": {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["a<b", "Köln"]},
            "name": {"type": "string", "maxLength": 6},
            "count": {"type": "integer", "minimum": -3, "maximum": 40},
            "deep": {"$ref": "#/$defs/deep"},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["kind", "name", "deep"],
        "$defs": {
            "deep": {
                "type": "object",
                "properties": {"x": {"type": ["null", "boolean"]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "none": {"type": "object", "properties": {}},
    "bare": {},
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_model_of_random_weights_makes_valid_calls(name: str, vocabulary: Vocabulary) -> None:
    """Each token is any that the grammar allows."""
    grammar = grammar_for(
        TOOL_FORMATS[name],
        None,
        BOUNDED,
        required=True,
        parallel=False,
        special=vocabulary.special,
        prompt_end=start_of(name),
    )
    if name == "harmony" and not vocabulary.special:
        pytest.skip("its markers are always special tokens")
    first = vocabulary.matcher(grammar)
    for seed in range(SEEDS):
        text = sample(vocabulary, first.deep_copy(), random.Random(seed))
        message = read_bounded(name, text)
        ((tool, arguments),) = message.calls
        jsonschema.validate(json.loads(arguments), BOUNDED[tool])


def sample(vocabulary: Vocabulary, matcher: LLMatcher, draw: random.Random) -> str:
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 2000:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(vocabulary.library.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        markers = [i for i in allowed if i > 255 and draw.random() < 0.1]  # else free text would go on and on
        token = draw.choice(markers or allowed)
        matcher.consume_token(token)
        if token == vocabulary.eos:
            break
        ids.append(token)
    assert matcher.is_accepting() or matcher.is_stopped()
    return str(vocabulary.backend.decode(ids, skip_special_tokens=False))


def read_bounded(name: str, text: str) -> Message:
    parser = MessageParser(TOOL_FORMATS[name], None, BOUNDED, prompt_end=start_of(name))  # type: ignore[arg-type]
    parts = parser.push(text) + parser.finish()
    names = [part.text for part in parts if part.kind == "call"]
    arguments = ["".join(p.text for p in parts if p.kind == "arguments" and p.call == i) for i in range(len(names))]
    assert name == "harmony" or not [part for part in parts if part.kind == "content"], text
    return Message(calls=tuple(zip(names, arguments, strict=True)))


def test_the_grammar_is_the_parsers() -> None:
    """The texts that the other tests accept are read as calls."""
    for name, format in TOOL_FORMATS.items():
        text = write_calls(format, [WEATHER])
        assert read(Case(name, "", text, Message(), start_of(name)), []).calls
