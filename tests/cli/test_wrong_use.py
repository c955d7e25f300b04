"""Every wrong use of the command line is one line that names the value and the remedy, and ends with 2."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli.main import app
from penstock.cli.options import ENGINE, SERVER
from penstock.cli.tenants.keys import add
from penstock.cli.usage import DONE_OTHERWISE, MEANT
from tests.cli.conftest import RunCommand
from tests.cli.wrong_values import BEFORE, NOT_SHOWN, OWN, SHARED, SWITCH, Wrong

REQUIRED: Mapping[str, Mapping[str, str]] = {  # right values of arguments that a command cannot do without
    "batch": {"REQUESTS": "requests.jsonl", "ANSWERS": "answers.jsonl"},
    "fleet status": {"ENGINES": "127.0.0.1:1"},
    "fleet drain": {"ENGINES": "127.0.0.1:1"},
    "fleet scale": {"ENGINES": "127.0.0.1:1", "ON": "--on=kubernetes:deployment/x", "REPLICAS": "--replicas=1"},
    "plan fleet": {"MODEL": "--model=llama-3.1-8b", "RATE": "--rate=1"},
    "simulate": {"SCENARIO": "batching"},
    "quantize": {"MODEL": "python-8m", "OUT": "out"},
    "tenants add": {"FILE": "tenants.yaml", "TENANT": "search"},
    "tenants rotate": {"FILE": "tenants.yaml", "TENANT": "search"},
    "audit verify": {"FILE": "requests.jsonl"},
    "route fit": {"LABELS": "labels.jsonl"},
    "route evaluate": {"LABELS": "labels.jsonl"},
    "stop": {"NAME": "ours"},
}
MODELS = ("plan", "serve", "run", "bench throughput", "bench latency", "bench quality", "verify")


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`serve` starts its engine before it reads the command line; these tests need none. Nothing is downloaded."""
    monkeypatch.setattr("penstock.cli.serve.EngineChild", lambda: contextlib.nullcontext())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it is read from the environment only once
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text('{"custom_id":"a","url":"/v1/completions","body":{"prompt":"a"}}')
    add(str(tmp_path / "tenants.yaml"), "search", "default", None, (), (), admin=False)
    (tmp_path / "wrong_providers.yaml").write_text('{"providers": {"x": {"url": "http://127.0.0.1:1/v1"}}}')
    labels = ({"request": {"prompt": str(number)}, "small": number % 2, "large": 1} for number in range(20))
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    (tmp_path / "one.jsonl").write_text('{"request": {}, "small": 1, "large": 1}')
    (tmp_path / "short.key").write_text("too short\n")


def commands(command: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """The commands of the command line that are not groups."""
    command = command or typer.main.get_command(app)
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}".strip())
    if not getattr(command, "commands", {}):
        yield path, command


def label(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper()).strip("{}[]")
    return max((flag for flag in param.opts), key=len)


def shared(command: Any) -> set[str]:
    names = {*ENGINE, *SERVER}
    return {label(param) for param in command.params if param.name in names and param.param_type_name == "option"}


COMMANDS = dict(commands())
TAKES_SHARED = [path for path, command in COMMANDS.items() if "--config" in map(label, command.params)]


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """A server that does not answer is no wrong use: it may answer later."""
    said = done.stderr
    assert done.returncode == (1 if "is a server running there?" in words else 2), (done.returncode, done.stdout, said)
    assert said.startswith("penstock: ") and said.count("\n") == 1 and "Traceback" not in said, said
    for word in words:
        assert word in said, (word, said)


def shown_value(flag: str, value: str) -> str:
    """What an error must show of a value."""
    return "" if flag in NOT_SHOWN else value


def table(wrong: Mapping[str, Wrong]) -> Iterator[tuple[str, str, str]]:
    for flag, values in wrong.items():
        for value, words in values:
            yield flag, value, words


def test_every_flag_and_argument_is_in_the_table() -> None:
    """A new one needs an entry in wrong_values.py."""
    for path, command in COMMANDS.items():
        own = {label(param) for param in command.params}
        if path in TAKES_SHARED:
            assert shared(command) <= {*SHARED}, path
            own -= {flag for flag in SHARED if flag not in OWN[path]}
        assert own == {*OWN[path]}, path


def test_every_entry_has_wrong_values() -> None:
    """Only a switch has none: any value of it is wrong, and another test gives each one."""
    for path, command in COMMANDS.items():
        for param in command.params:
            values = OWN[path].get(label(param), SHARED.get(label(param)))
            assert (values is SWITCH) == getattr(param, "is_flag", False), (path, label(param))


@pytest.mark.parametrize(("flag", "value", "words"), table(SHARED))
def test_a_wrong_setting(run_command: RunCommand, flag: str, value: str, words: str) -> None:
    assert_one_line(run_command("plan", flag, value), flag, shown_value(flag, value), words)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--kv-cache-memory", "1KiB", "set --kv-cache-memory"),
        ("--kv-cache-memory", "900TiB", "does not fit"),
        ("--max-num-seqs", "100000000", "set --max-num-seqs"),
    ],
)
def test_a_setting_that_does_not_fit(run_command: RunCommand, flag: str, value: str, words: str) -> None:
    assert_one_line(run_command("plan", flag, value), flag, words)


@pytest.mark.parametrize("path", [path for path in TAKES_SHARED if path != "plan"])
def test_a_wrong_setting_of_each_command(run_command: RunCommand, path: str) -> None:
    for flag in sorted(shared(COMMANDS[path]) & {*SHARED} - {*OWN[path]}):
        for value, words in SHARED[flag][:1]:
            required = REQUIRED.get(path, {}).values()
            assert_one_line(run_command(*path.split(), *required, flag, value), flag, shown_value(flag, value), words)


@pytest.mark.parametrize("path", OWN)
def test_a_wrong_value(run_command: RunCommand, path: str) -> None:
    for flag, value, words in table(OWN[path]):
        required = dict(REQUIRED.get(path, {}))
        given = [flag, value] if flag.startswith("--") else []
        if before := BEFORE.get(f"{path} {flag}"):
            arguments = [*before, *(given or [value])]
        else:
            if not given:
                required[flag] = value
            arguments = [*required.values(), *given]
        shown = flag if flag.startswith("--") and flag != "--model" else ""
        done = run_command(*path.split(), *arguments)
        assert_one_line(done, shown, shown_value(flag, value), words)


@pytest.mark.parametrize("path", COMMANDS)
def test_a_flag_without_its_value_and_a_switch_with_one(run_command: RunCommand, path: str) -> None:
    for param in COMMANDS[path].params:
        if param.param_type_name == "argument" or param.name == "help":
            continue
        for flag in filter(lambda flag: flag.startswith("--"), param.opts):
            if param.is_flag:
                assert_one_line(run_command(*path.split(), f"{flag}=yes"), f"{flag} takes no value", f"{path} --help")
            else:
                assert_one_line(
                    run_command(*path.split(), flag), f"{flag} needs a value", f"try penstock {path} --help"
                )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("server", ("'server'", "did you mean penstock serve?")),
        ("benchmark", ("'benchmark'", "did you mean penstock bench?")),
        ("version", ("'version'", "write penstock --version")),
        ("chat", ("'chat'", "write penstock run")),
        ("create mine -f Modelfile", ("'create'", "penstock serve ./model.gguf")),
        ("download smollm2-135m", ("'download'", "write penstock pull")),
        ("frobnicate", ("'frobnicate'", "there are: serve, run, plan")),
        ("./my-model", ("penstock serve ./my-model",)),
        ("model.Q4_K_M.gguf", ("penstock serve model.Q4_K_M.gguf",)),
        ("org/name", ("penstock serve org/name",)),
        ("bench througput", ("'througput'", "did you mean penstock bench throughput?")),
        ("bench all", ("'all'", "there are: throughput, latency")),
        ("plan --quantisation int8", ("--quantisation", "did you mean --quantization?")),
        ("serve --prot 8080", ("--prot", "did you mean --port?")),
        ("plan --max-seqs 3", ("--max-seqs", "did you mean --max-num-seqs?")),
        ("plan --kv 3", ("--kv", "--kv-cache-memory or --kv-cache-dtype")),
        ("plan --zzz", ("--zzz", "try penstock plan --help")),
        ("serve -p 80", ("-p", "try penstock serve --help")),
        ("--versoin", ("--versoin", "did you mean --version?")),
        ("--port 80 serve", ("penstock serve --port",)),
        ("--quantization int8 plan", ("penstock plan --quantization",)),
        ("plan --max-tokens 3", ("--max-tokens", "a flag of penstock run")),
        ("top --url http://127.0.0.1:8000", ("--url", "write penstock top URL")),
        ("sleep --url=http://127.0.0.1:8000", ("--url", "write penstock sleep URL")),
        ("plan a b", ("'b'", "try penstock plan --help")),
        ("serve ./a --model ./b", ("./a", "./b", "leave one out")),
        ("replay", ("FILE", "try penstock replay --help")),
        ("replay a b", ("'b'", "try penstock replay --help")),
        ("plan --tenants tenants.yaml --quota-redis http://127.0.0.1", ("--quota-redis", "write for example redis://")),
        ("plan --tenants tenants.yaml --audit on --audit-file .", ("--audit-file .", "name another file")),
        ("plan --tenants tenants.yaml --audit on --audit-heads heads.jsonl", ("set --audit-key-file",)),
        (
            "plan --tenants tenants.yaml --audit on --audit-key-file no-file",
            ("--audit-key-file no-file", "name a file"),
        ),
        (
            "plan --tenants tenants.yaml --audit on --audit-key-file short.key",
            ("--audit-key-file short.key", "give 16 or more"),
        ),
        ("plan --tenants tenants.yaml --api-key secret", ("--tenants", "leave --api-key out")),
        ("simulate", ("needs SCENARIO", "--list")),
        ("simulate --fit a.jsonl", ("--fit needs --json FILE",)),
        ("simulate batching --trace a.jsonl", ("--trace 'a.jsonl'", "no trace to replace")),
        ("simulate mine --show", ("--show 'mine'", "name one of batch-size")),
        ("plan fleet --model llama-3.1-8b", ("needs --rate", "plan fleet --help")),
        ("quantize python-8m requests.jsonl/out", ("OUT is", "it is not a folder; name another one")),
        ("quantize smollm2-135m out", ("cannot become a folder with --scheme int4", "name a folder in safetensors")),
        ("quantize python-8m out --scheme fp8 --group 64", ("--group has no effect", "leave it out")),
        ("repository status doubled", ("takes no name",)),
        ("tenants add tenants.yaml search", ("'search'", "penstock tenants rotate")),
        ("audit verify requests.jsonl --heads heads.jsonl", ("--key-file",)),
        ("route fit one.jsonl", ("LABELS one.jsonl has 1 labels, 1 of them", "give at least 20")),
        ("bench quality --tokens-in a.json --window-tokens 9", ("--window-tokens 9", "leave one out")),
    ],
)
def test_a_wrong_command_line(run_command: RunCommand, line: str, words: tuple[str, ...]) -> None:
    assert_one_line(run_command(*line.split()), *words)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PENSTOCK_PROT", "80", ("did you mean PENSTOCK_PORT?",)),
        ("PENSTOCK_MAX_MODEL_LENGTH", "80", ("did you mean PENSTOCK_MAX_MODEL_LEN?",)),
        ("PENSTOCK_ZZZ", "80", ("penstock serve --help lists them",)),
        ("PENSTOCK_PORT", "http", ("'http'", "from 0 to 65535")),
        ("PENSTOCK_ENFORCE_EAGER", "perhaps", ("'perhaps'", "give true or false")),
        ("PENSTOCK_CONFIG", "no-such-file.yaml", ("no-such-file.yaml", "name a YAML file")),
    ],
)
def test_a_wrong_variable(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(variable, value)
    assert_one_line(run_command("plan"), variable if variable != "PENSTOCK_CONFIG" else value, *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"port: 80\nmax-model-length: 4\n", ("line 2", "did you mean max-model-len?")),
        (b"# comment\nport: http\n", ("--port", "line 2", "'http'", "from 0 to 65535")),
        (b"port: [1\n", ("line 2", "not valid YAML")),
        (b"port: 1\n\nport: 2\n", ("line 3", "--port is set twice, first in line 1")),
        (b"- port\n", ("expected one setting a line",)),
        (b"\xff\xfe", ("not UTF-8 text",)),
        (b"port: yes\n", ("line 1", "not true or false")),
        (b"model: [1]\n", ("--model", "give a text")),
    ],
)
def test_a_wrong_file(run_command: RunCommand, tmp_path: Path, text: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "settings.yaml").write_bytes(text)
    assert_one_line(run_command("plan", "--config", "settings.yaml"), "settings.yaml", *words)


def test_groups_of_commands_show_their_help(run_command: RunCommand) -> None:
    for arguments in ((), ("bench",)):
        shown = run_command(*arguments)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == run_command(*arguments, "-h").stdout == run_command(*arguments, "--help").stdout


def test_names_of_other_programs_lead_to_commands() -> None:
    flags = {flag for param in typer.main.get_command(app).params for flag in param.opts} | {"--help"}
    assert set(MEANT.values()) <= {*COMMANDS} | flags
    assert not {*MEANT, *DONE_OTHERWISE} & {*COMMANDS}
