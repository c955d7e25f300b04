"""The same ids and texts as transformers' AutoTokenizer gives for the same files."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.text import Tokenizer, TokenizerError
from tests.smollm2 import smollm2
from tests.text import tokenizers_on_disk
from tests.text.tokenizers_on_disk import KINDS

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two blanks, and a tab\t",
    "line\nline\r\n\n\nline",
    "naïve café 你好，世界 🙂👍🏽 zero\x00byte",
    "e\u0301 composed by NFC",
    "<s>[INST] hi [/INST] there</s><s>[INST]",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n<tool call> <|reserved|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_image><image_soft_token>",
    "<unk> <pad> <0x0A> ▁ literal pieces",
    "12345 678 isn't IT'S we'll",
]

Load = Callable[[str], Tokenizer]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def reference_of(folder_of: Folder) -> Callable[[str], Any]:
    @cache
    def load(kind: str) -> Any:
        return AutoTokenizer.from_pretrained(folder_of(kind))

    return load


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_as_transformers_does(kind: str, tokenizer_of: Load, reference_of: Callable[[str], Any]) -> None:
    ours, theirs = tokenizer_of(kind), reference_of(kind)
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special), (
                text
            )


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_encodes_any_text_as_transformers_does(
    kind: str, text: str, tokenizer_of: Load, reference_of: Callable[[str], Any]
) -> None:
    assert tokenizer_of(kind).encode(text) == reference_of(kind).encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_as_transformers_does(kind: str, tokenizer_of: Load, reference_of: Callable[[str], Any]) -> None:
    ours, theirs = tokenizer_of(kind), reference_of(kind)
    draw = random.Random(kind)
    for _ in range(60):
        ids = [draw.randrange(ours.vocab_size + 3) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize("kind", KINDS)
def test_knows_the_same_special_tokens(kind: str, tokenizer_of: Load, reference_of: Callable[[str], Any]) -> None:
    ours, theirs = tokenizer_of(kind), reference_of(kind)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.special_ids >= set(theirs.all_special_ids) - {None}
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize(
    "changes",
    [
        {"legacy": True},
        {"add_prefix_space": False},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": None},
        {"split_special_tokens": True},
        {"extra_special_tokens": ["<extra>", "[INST]"]},
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}, "400": {"content": "<late>"}}},
    ],
    ids=lambda changes: next(f"{key}={value}" for key, value in changes.items()),
)
def test_settings_of_a_llama_tokenizer_act_as_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizers_on_disk.llama2(tmp_path, **changes)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "<extra> a <late>b"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"])
def test_a_class_has_special_tokens_of_its_own_where_the_files_name_none(name: str, tmp_path: Path) -> None:
    tokenizers_on_disk.llama2(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "bos_token": None}))
    (tmp_path / "special_tokens_map.json").unlink()
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    text = "<bos> <eos> </s> <|endoftext|> <mask>"
    assert ours.encode(text) == theirs.encode(text)


def test_older_checkpoints_keep_added_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    tokenizers_on_disk.llama2(tmp_path, legacy=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": 900, "<|end|>": 901}))
    special = json.loads((tmp_path / "special_tokens_map.json").read_text())
    special |= {"eos_token": "<|end|>", "image_token": {"content": "<|user|>", "normalized": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<|user|> hi <|end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_transformers_saves(kind: str, tmp_path: Path, reference_of: Callable[[str], Any]) -> None:
    reference_of(kind).save_pretrained(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}


def test_truncation_and_padding_saved_in_the_file_are_off(tmp_path: Path, folder_of: Folder) -> None:
    saved = json.loads((folder_of("qwen") / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("one two three four five six")) == "one two three four five six"
    assert len(tokenizer.encode("a")) == 1


def test_tokens_as_text_and_bytes(tokenizer_of: Load) -> None:
    qwen, llama = tokenizer_of("qwen"), tokenizer_of("llama2")
    for tokenizer in (qwen, llama):
        ids = tokenizer.encode(" Hello 🙂\n", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).strip() == "Hello 🙂".encode()
    newline = llama.encode("<0x0A>\n")[-1]
    assert (llama.token(newline), llama.token_bytes(newline)) == ("\n", b"\n")
    blank = next(i for i in range(llama.vocab_size) if llama.token_bytes(i) == b"  ")
    assert llama.token(blank) == "  "
    assert qwen.token(qwen.encode("<|im_end|>")[0]) == "<|im_end|>"
    assert qwen.token(qwen.encode("<tool call>")[0]) == "<tool call>"
    lone = next(i for i in range(llama.vocab_size) if llama.token_bytes(i) == b"\xf0")
    assert llama.token(lone) == "bytes:\\xf0"
    assert (qwen.token(qwen.vocab_size + 5), qwen.token_bytes(qwen.vocab_size + 5)) == ("", b"")


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_an_unpaired_surrogate_is_refused(text: str, tokenizer_of: Load) -> None:
    with pytest.raises(TokenizerError, match=r"unpaired surrogate \(U\+D[8F](00|FF)\) at character"):
        tokenizer_of("qwen").encode(text)


@pytest.mark.parametrize("bad", [-1, 2**32, "x", None])
def test_ids_that_are_none_are_refused(bad: Any, tokenizer_of: Load) -> None:
    with pytest.raises(TokenizerError, match="is not a token id of 0 to"):
        tokenizer_of("qwen").decode([1, bad])


class PanicException(BaseException):
    """As a panic in Rust arrives in Python."""


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode_batch_fast(self, *args: Any, **named: Any) -> Any:
        raise self.error

    decode_batch = encode_batch_fast


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), Exception("index out of bounds")])
def test_a_failure_inside_the_library_fails_the_call_and_no_more(error: BaseException, folder_of: Folder) -> None:
    tokenizer = Tokenizer.load(folder_of("qwen"))
    tokenizer._backend = Failing(error)
    with pytest.raises(TokenizerError, match="failed on this text: index out of bounds"):
        tokenizer.encode("x")
    with pytest.raises(TokenizerError, match="cannot be decoded: index out of bounds"):
        tokenizer.decode([1])


def test_an_interrupt_is_no_failure_of_the_tokenizer(folder_of: Folder) -> None:
    tokenizer = Tokenizer.load(folder_of("qwen"))
    tokenizer._backend = Failing(KeyboardInterrupt())
    for call in (lambda: tokenizer.encode("x"), lambda: tokenizer.decode([1])):
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_meanwhile(work: str, tokenizer_of: Load) -> None:
    tokenizer, others_ran = tokenizer_of("qwen"), 0
    text = "hello world " * 20_000
    call = partial(tokenizer.encode, text) if work == "encode" else partial(tokenizer.decode, tokenizer.encode(text))
    seen: list[int] = []

    def count_around() -> None:
        before = others_ran
        call()
        seen.append(others_ran - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # Python's lock goes to another thread only where a call gives it up
    try:
        for _ in range(10):  # a busy machine may not wake this thread during a call
            thread = threading.Thread(target=count_around)
            thread.start()
            while thread.is_alive():
                others_ran += 1
                time.sleep(0.0001)
    finally:
        sys.setswitchinterval(interval)
    assert max(seen) > 0


def test_the_vocabulary_may_have_holes(tmp_path: Path) -> None:
    saved = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 7}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert Tokenizer.load(tmp_path).vocab_size == 8


def test_the_room_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, penstock.text; print([m for m in ('torch', 'transformers', 'asyncio') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def _remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _remove_but_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def _truncate(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-100])


def _unknown_decoder(folder: Path) -> None:
    tokenizers_on_disk.words(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove, "has no tokenizer.json. Download it"),
        (_remove_but_sentencepiece, r"has tokenizer.model but no tokenizer.json.*save_pretrained"),
        (_truncate, r"tokenizer\.json is not a tokenizer"),
        (_unknown_decoder, "CTC cannot be streamed"),
        (_write("tokenizer_config.json", "{"), r"tokenizer_config\.json is not valid JSON"),
        (_write("tokenizer_config.json", "[]"), r"tokenizer_config\.json holds a JSON array"),
        (_write("tokenizer_config.json", '{"eos_token": 7}'), "special tokens of .* are malformed"),
        (_write("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'), "special tokens of .* are malformed"),
        (_write("tokenizer_config.json", '{"chat_template": 3}'), r"chat_template in .*tokenizer_config\.json"),
        (_write("chat_template.jinja", "{% for %}"), r"chat_template\.jinja: the chat template is not valid Jinja"),
        (_write("special_tokens_map.json", "nonsense"), r"special_tokens_map\.json is not valid JSON"),
    ],
)
def test_a_broken_folder_is_refused_by_the_name_of_the_file(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    tokenizers_on_disk.qwen(tmp_path)
    damage(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there is no folder"):
        Tokenizer.load(tmp_path / "absent")


def test_tokenizer_json_alone_is_enough(tmp_path: Path, folder_of: Folder) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder_of("qwen") / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)


CACHE = """
import os, random, string, sys
from penstock.observe.processes import usage_of_one
from penstock.text import Tokenizer

tokenizer, source = Tokenizer.load(sys.argv[1]), random.Random(1)
before = usage_of_one(os.getpid())[0]
for _ in range(200):
    tokenizer.encode(" ".join("".join(source.choices(string.ascii_letters, k=200)) for _ in range(100)))
print(usage_of_one(os.getpid())[0] - before)
"""


def test_texts_of_unknown_words_leave_little_in_memory() -> None:
    """The library remembers words, and kept 10,000 for ever: 25 MB here, 100 MB in a server that was attacked."""
    done = subprocess.run([sys.executable, "-c", CACHE, str(smollm2())], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 12 << 20, done.stderr
