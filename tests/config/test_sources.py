"""Where settings come from, who wins, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError, read_settings
from penstock.config.settings import Settings


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "penstock.yaml"
    path.write_text(text)
    return path


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "port: 1\nmax-num-seqs: 1\nmax_model_len: 1\nkv-cache-memory: 1GiB\n")
    environ = {"PENSTOCK_PORT": "2", "PENSTOCK_MAX_NUM_SEQS": "2", "HOME": "/root"}
    given = read_settings({"port": 3, "host": None}, environ, path)
    assert (given.settings.port, given.settings.max_num_seqs, given.settings.max_model_len) == (3, 2, 1)
    assert given.settings.kv_cache_memory == 1 << 30
    assert given.sources == {
        "port": "command line",
        "max_num_seqs": "environment variable PENSTOCK_MAX_NUM_SEQS",
        "max_model_len": f"{path}, line 3",
        "kv_cache_memory": f"{path}, line 4",
    }


def test_nothing_said() -> None:
    given = read_settings()
    assert given.sources == {} and given.settings == Settings()


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "port: 1\n")
    assert read_settings(environ={"PENSTOCK_CONFIG": str(path)}).settings.port == 1
    other = tmp_path / "other.yaml"
    other.write_text("port: 2\n")
    assert read_settings(environ={"PENSTOCK_CONFIG": str(path)}, file=other).settings.port == 2


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read_settings(file=yaml_file(tmp_path, "# nothing yet\n")).sources == {}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("no", False)])
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert read_settings(environ={"PENSTOCK_ENABLE_PREFIX_CACHING": text}).settings.enable_prefix_caching is value


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PENSTOCK_MAX_MODEL_LENGTH": "1"}, ["PENSTOCK_MAX_MODEL_LENGTH", "did you mean PENSTOCK_MAX_MODEL_LEN?"]),
        ({"PENSTOCK_QQQ": "1"}, ["PENSTOCK_QQQ", "penstock serve --help lists them"]),
        ({"PENSTOCK_PORT": "http"}, ["--port", "PENSTOCK_PORT", "'http'", "a whole number from 0 to 65535"]),
        ({"PENSTOCK_PORT": "65536"}, ["'65536'", "from 0 to 65535"]),
        ({"PENSTOCK_DTYPE": "float16"}, ["--dtype", "'float16'", "give auto, float32 or bfloat16"]),
        ({"PENSTOCK_KV_CACHE_MEMORY": "much"}, ["'much'", "give an amount of memory, such as 4GiB"]),
        ({"PENSTOCK_MAX_NUM_SEQS": "0"}, ["--max-num-seqs", "from 1 to 2147483647"]),
        ({"PENSTOCK_SEED": "-1"}, ["--seed", "from 0 to 18446744073709551615"]),
        ({"PENSTOCK_STEP_DEADLINE": "nan"}, ["--step-deadline", "above 0 up to 86400"]),
        ({"PENSTOCK_BLOCK_SIZE": "x", "PENSTOCK_THREADS": "y"}, ["--block-size", "'x'"]),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(environ=environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_modle_len: 1\n", "line 1: there is no setting max-modle-len; did you mean max-model-len?"),
        ("port: 1\nport: 2\n", "--port is set twice"),
        ("max-model-len: 1\nmax_model_len: 2\n", "--max-model-len is set twice"),
        ("- port\n", "expected one setting a line"),
        ("just words\n", "expected one setting a line"),
        ("port: [1\n", "not valid YAML"),
        ("port: !!python/object:os.system 1\n", "not valid YAML"),
        ("port: true\n", "a number is expected, not true or false"),
        ("max-model-len: yes\n", "a number is expected"),
        ("port: {a: 1}\n", "a whole number from 0 to 65535"),
        ("1: 2\n", "there is no setting 1"),
        ("port: \udcff\n", "not UTF-8 text"),
        ("port: 1\napi-key:\n", "line 2: --api-key has no value"),
        ("api-key: ~\n", "line 1: --api-key has no value"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_settings(file=path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: no such file"):
        read_settings(file=tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_settings(file=yaml_file(tmp_path, "#" * (1 << 20) + "\n"))


def test_a_wrong_flag_is_named() -> None:
    flags: dict[str, Any] = {"max_model_len": -1}
    with pytest.raises(ConfigError, match=r"--max-model-len \(command line\) is -1: give a whole number from 1"):
        read_settings(flags)


def test_a_key_is_not_repeated_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"api_key": ["secret"]})
    assert "secret" not in str(caught.value)


def test_every_setting_is_described() -> None:
    assert all(field.description and field.default is None for field in Settings.model_fields.values())
