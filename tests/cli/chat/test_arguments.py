"""Which words of `penstock run` are the model and which are the prompt."""

import io
from pathlib import Path

import pytest

from penstock.cli.chat.arguments import MAX_INPUT_BYTES, join_prompt, read_input, split_arguments

KNOWN = ["smollm2-135m", "python-8m"]


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        ([], None, None),
        (["smollm2-135m"], "smollm2-135m", None),
        (["smollm2-135m", "Hi"], "smollm2-135m", "Hi"),
        (["python-8m", "two", "words"], "python-8m", "two words"),
        (["What is 2+2?"], None, "What is 2+2?"),
        (["Hello!"], None, "Hello!"),  # no name has such a character
        (["你好"], None, "你好"),
        (["Summarise:"], None, "Summarise:"),  # no name ends so
        (["Continue..."], None, "Continue..."),
        (["first line\nsecond"], None, "first line\nsecond"),
        (["is it a/b or c?"], None, "is it a/b or c?"),
        (["Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B", None),
        (["org/name:Q4_K_M", "Hi"], "org/name:Q4_K_M", "Hi"),
        (["./missing", "Hi"], "./missing", "Hi"),  # locate_model says that it does not exist
        (["~/models/äöü", "Hi"], "~/models/äöü", "Hi"),
        (["my model.gguf"], "my model.gguf", None),
        ([""], None, ""),
    ],
)
def test_the_model_or_the_prompt(words: list[str], model: str | None, prompt: str | None) -> None:
    assert split_arguments(words, None, KNOWN) == (model, prompt)


def test_with_the_flag_all_words_are_the_prompt() -> None:
    assert split_arguments(["smollm2-135m"], "python-8m", KNOWN) == ("python-8m", "smollm2-135m")
    assert split_arguments([], "python-8m", KNOWN) == ("python-8m", None)


def test_what_exists_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hello", "my model"):
        (tmp_path / name).mkdir()
        assert split_arguments([name, "Hi"], None, KNOWN) == (name, "Hi")


def test_a_text_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match=r"'notes.txt' is a file, but no model: .* penstock run < notes.txt"):
        split_arguments(["notes.txt"], None, KNOWN)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hello"], ("'hello'", "penstock run smollm2-135m hello")),
        (["smollm2"], ("'smollm2'", "Did you mean smollm2-135m?")),
        (["pyhton-8m", "Hi"], ("'pyhton-8m'", "Did you mean python-8m?", 'penstock run "pyhton-8m Hi"')),
        (["What", "is", "2+2?"], ("'What'", 'quotes around them: penstock run "What is 2+2?"')),
        (["What is", "2+2?"], ("'What is'", "model before the prompt", "quotes")),
        (["x" * 10_000], ("'xxx", "…'")),
    ],
)
def test_what_may_be_either_is_an_error_of_one_line(words: list[str], said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        split_arguments(words, None, KNOWN)
    line = str(error.value)
    assert all(part in line for part in said), line
    assert "\n" not in line and len(line) < 300


def test_a_piped_text_follows_the_prompt() -> None:
    assert join_prompt("Summarise:", "a\nb\n", raw=False) == "Summarise:\n\na\nb"
    assert join_prompt(None, "hi\n", raw=False) == "hi"
    assert join_prompt("hi", "", raw=False) == "hi"
    assert join_prompt("def f(", "x):\n", raw=True) == "def f(x):\n"


def test_input_is_bounded_text() -> None:
    assert read_input(io.BytesIO("\ufeffGrüße".encode())) == "Grüße"  # a byte order mark is no text
    with pytest.raises(ValueError, match="byte 2 is 0xff; send text"):
        read_input(io.BytesIO(b"ab\xff"))
    with pytest.raises(ValueError, match="more than 16 MiB; send less"):
        read_input(io.BytesIO(b"a" * (MAX_INPUT_BYTES + 1)))
