"""The commands of a chat: what they show, what they change, and their errors of one line."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.cli.chat.chat import AnswerFigures, Chat
from penstock.cli.chat.commands import ALIASES, COMMANDS, Leave, execute, is_command
from penstock.cli.chat.conversation import Conversation
from penstock.cli.chat.settings import ChatSettings
from penstock.frontend.openai.fields import ChatFields
from penstock.text import Tokenizer
from penstock.weights.packaged import embedded_model
from tests.frontend.scripted import ScriptedClient


@pytest.fixture
def chat() -> Chat:
    settings = ChatSettings({"temperature": 0.2, "top_p": 0.9}, {"top_p": 0.5, "stats": True})
    client = ScriptedClient(lambda request, choice: [1], vocab_size=8000, eos=0)
    return Chat(client, Tokenizer.load(embedded_model()), settings, Conversation())


def rows(shown: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in shown.splitlines()}


def test_commands_and_messages() -> None:
    for command in ("/?", "/set", "/set seed 1", "/save my file", "/system a\nb", "/Clear"):
        assert is_command(command)
    for message in ("hello", " /set", "/etc/hosts", "// comment", "/* c */", "/"):
        assert not is_command(message)


def test_settings_have_sources(chat: Chat) -> None:
    shown = rows(execute(chat, "/set"))
    assert shown["temperature"] == ["0.2", "the", "model"]
    assert shown["top_p"] == ["0.5", "the", "command", "line"]
    assert shown["min_p"] == ["0", "default"] and shown["stats"] == ["on", "the", "command", "line"]
    assert execute(chat, "/set temperature 0.75").split() == ["temperature", "0.75", "/set"]
    assert execute(chat, "/set TOP-K 40").split() == ["top_k", "40", "/set"]
    execute(chat, "/set seed 7")
    execute(chat, "/set max_tokens 9")
    execute(chat, "/set stats off")
    sampling = chat.settings.sampling(1, 100, (0,))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.75, 0.5, 40)
    assert (sampling.seed, sampling.max_tokens, sampling.eos_token_ids) == (7, 9, (0,))
    assert chat.settings["stats"] is False
    assert execute(chat, "/set temperature default").split() == ["temperature", "0.2", "the", "model"]
    assert execute(chat, "/set seed default").split() == ["seed", "random", "default"]
    assert chat.settings.sampling(1, 5, ()).seed == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", ("temperature is 'hot'", "a number, or default")),
        ("/set temperature -1", ("temperature is -1", "0 (greedy) or more")),
        ("/set temperature nan", ("temperature is nan", "0 (greedy) or more")),
        ("/set top_p 1.5", ("top_p is 1.5", "from 0 to 1")),
        ("/set top_k 1.5", ("top_k is '1.5'", "a whole number")),
        ("/set top_k 99999999999", ("top_k is 99999999999", "at most 2147483647")),
        ("/set repetition_penalty 0", ("repetition_penalty is 0", "from 0.01 to 100")),
        ("/set presence_penalty 3", ("presence_penalty is 3", "from -2 to 2")),
        ("/set seed -1", ("seed is -1", "from 0 to")),
        ("/set max_tokens 0", ("max_tokens is 0", "1 or more")),
        ("/set stats maybe", ("stats is on or off, not 'maybe'",)),
        ("/set tempature 1", ("no setting tempature", "did you mean temperature?")),
        ("/set temp 5", ("no setting temp", "did you mean temperature? Type /set temperature 5")),
        ("/set max", ("no setting max", "did you mean max_tokens? Type /set max_tokens")),
        ("/set parameter temperature 0.7", ("/set temperature 0.7",)),
        ("/set max_tokens 4k", ("max_tokens is '4k'", "a whole number, or default; 4k is 4096")),
        ("/set wings on", ("no setting wings", "/set shows all settings")),
        ("/sett", ("no command /sett", "did you mean /set?", "begin with a space")),
        ("/xyzzy", ("no command /xyzzy", "/? lists the commands")),
        ("/save", ("/save needs the name of a file",)),
        ("/save x.json", ("nothing to save yet",)),
        ("/load", ("/load needs the name of a file",)),
        ("/load no-such-file", ("no-such-file cannot be read: no such file",)),
        ("/load /", ("/ cannot be read: is a directory",)),
    ],
)
def test_a_mistake_is_one_line(chat: Chat, line: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        execute(chat, line)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0; it must be 0"),
        ({"max_tokens": 0}, "--max-tokens is 0; it must be 1 or more"),
        ({"top_k": -1}, "--top-k is -1; it must be 0"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChatSettings({}, flags)


def test_a_model_that_recommends_nothing_is_sampled_with_care() -> None:
    assert ChatSettings({}, {}).sampling_summary() == "temperature 0.7, top_p 0.95"
    assert ChatSettings({"repetition_penalty": 1.05}, {}).sampling_summary() == "repetition_penalty 1.05"
    assert ChatSettings({"temperature": 1.0}, {}).sampling_summary() == "temperature 1"
    assert ChatSettings({}, {"temperature": 0.0}).sampling(0, 1, ()).temperature == 0


def test_the_system_prompt(chat: Chat) -> None:
    assert execute(chat, "/system").split()[-1] == "default"
    assert execute(chat, "/system Answer in rhymes.").split() == ["system", '"Answer', "in", 'rhymes."', "/system"]
    assert chat.conversation.messages("Hi")[0] == {"role": "system", "content": "Answer in rhymes."}
    execute(chat, '/set system ""')
    assert chat.conversation.messages("Hi")[0] == {"role": "system", "content": ""}
    execute(chat, "/system default")
    assert [message["role"] for message in chat.conversation.messages("Hi")] == ["user"]


def test_a_conversation_is_saved_and_loaded(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    turns = [("a\n\x1b[31m", "ä"), ("b", "")]
    chat.conversation = Conversation("Be brief.", list(turns), 1)
    assert execute(chat, f"/save {file}") == f"saved 2 turns to {file}"
    assert file.stat().st_mode & 0o777 == 0o600
    saved = json.loads(file.read_text())
    msgspec.json.decode(file.read_bytes(), type=ChatFields)  # a request's body
    assert saved["model"] == "scripted" and [m["role"] for m in saved["messages"]] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    with pytest.raises(ValueError, match=r"exists; /save -f .* overwrites it"):
        execute(chat, f"/save {file}")
    execute(chat, "/clear")
    assert (chat.conversation.turns, chat.conversation.system) == ([], "Be brief.")
    chat.conversation.system = None
    assert execute(chat, f'/load "{file}"') == f'loaded 2 turns from {file}, the last one: "b"'
    assert (chat.conversation.turns, chat.conversation.system, chat.conversation.forgotten) == (turns, "Be brief.", 0)
    chat.conversation.turns.append(("c", "d"))
    execute(chat, f"/save -f {file}")
    assert len(json.loads(file.read_text())["messages"]) == 7
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match="cannot be written: it is not a file"):
        execute(chat, "/save -f /dev/null")
    with pytest.raises(ValueError, match="cannot be written: no such file or directory"):
        execute(chat, f"/save {tmp_path}/no/such/folder")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"messages": 1}', "has no list of messages"),
        ('[{"role": "user"}]', "message 1 has no text"),
        ('[{"role": "user", "content": "a"}]', "ends with a message of the user"),
        ('[{"role": "assistant", "content": "a"}]', "message 1 has the role 'assistant', but 'user' must follow"),
        ('[{"role": "tool", "content": "a"}]', "message 1 has the role 'tool'"),
        (json.dumps([{"role": "user", "content": "a"}] * 10_001), "has 10001 messages; at most 10000 are read"),
        (" " * ((16 << 20) + 1), "has more than 16 MiB"),
    ],
    ids=["cut", "deep", "no list", "no text", "no answer", "order", "role", "many", "large"],
)
def test_a_file_that_is_no_conversation(chat: Chat, tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    before = chat.conversation
    with pytest.raises(ValueError, match=said) as error:
        execute(chat, f"/load {file}")
    assert chat.conversation is before and len(str(error.value)) < 300


def test_figures(chat: Chat) -> None:
    assert rows(execute(chat, "/stats"))["context"] == ["64", "tokens"]
    chat.conversation = Conversation(None, [("a", "b")] * 3, forgotten=2)
    chat.last = AnswerFigures(20, 16, 11, 0.5, 1.5, "complete", True)
    shown = execute(chat, "/stats")
    for part in (
        "3 turns",
        "the first 2 turns, as the context is full",
        "20 tokens, 16 of them from the prefix cache",
        "31 of 64 tokens used",
    ):
        assert part in shown
    assert "11 tokens, 10.0 tok/s, first token after 0.50 s" in shown


def test_help_lists_every_command_and_the_keys(chat: Chat) -> None:
    shown = execute(chat, "/help")
    assert all(f"/{name}" in shown for name in COMMANDS) and "Ctrl-D" in shown
    assert max(map(len, shown.splitlines())) <= 100
    for name in ("/bye", "/exit", "/quit"):
        with pytest.raises(Leave):
            execute(chat, name)
    assert set(ALIASES.values()) <= set(COMMANDS)


@pytest.mark.parametrize(("line", "leaves"), [("exit", True), ("quit ", True), (" exit", False), ("exit it", False)])
def test_a_word_alone_leaves(chat: Chat, line: str, leaves: bool) -> None:
    assert is_command(line) == leaves
    if leaves:
        with pytest.raises(Leave):
            execute(chat, line)
