"""The commands of a chat, which begin with a slash."""

import difflib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.chat.chat import Chat
from penstock.cli.chat.conversation import Conversation
from penstock.cli.chat.safe_text import one_line
from penstock.cli.chat.settings import NUMBERS, SWITCHES

_COMMAND = re.compile(r"/([A-Za-z?]+)(?:[ \t]+(.*))?", re.DOTALL)
LEAVING = ("exit", "quit")  # words that leave without a slash, as in other programs
KEYS = """\
Enter          Send the message
Alt-Enter      Begin a new line, as a \\ at the end of a line does. A pasted text keeps its lines
\"\"\"            Begin a message of several lines; \"\"\" ends it
Up, Ctrl-R     Earlier messages; search them
Ctrl-C         End an answer; at the prompt, clear the line; twice, leave
Ctrl-D         Leave"""


class Leave(Exception):
    """The user ends the session."""


@dataclass(frozen=True)
class Command:
    """A command: `run` gets the chat and the text after its name, and returns what to show. It raises ValueError."""

    run: Callable[[Chat, str], str]
    arguments: str
    purpose: str


def is_command(text: str) -> bool:
    """True for lines such as `/set seed 1` and `exit`. `/etc/hosts` and lines that begin with a space are messages."""
    return text.rstrip() in LEAVING or _COMMAND.fullmatch(text) is not None


def execute(chat: Chat, text: str) -> str:
    """Executes a command and returns what to show. Raises ValueError, one line that says what to type, and Leave."""
    if text.rstrip() in LEAVING:
        raise Leave
    found = _COMMAND.fullmatch(text)
    assert found is not None, "the caller checks that it is a command"
    name, argument = found[1].lower(), (found[2] or "").strip()
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
        meant = f"did you mean /{near[0]}?" if near else "/? lists the commands."
        raise ValueError(f"there is no command /{name[:40]}; {meant} To send the line as a message, begin with a space")
    return command.run(chat, argument)


def _set(chat: Chat, argument: str) -> str:
    settings = chat.settings
    if not argument:
        rows = [(name, settings.shown(name), settings.source(name)) for name in (*NUMBERS, *SWITCHES)]
        rows.append(("system", *_system_row(chat)))
        return _columns(rows)
    name, _, value = argument.partition(" ")
    name, value = name.lower().replace("-", "_"), value.strip()
    if name == "system":
        return _system(chat, value)
    if name not in (*NUMBERS, *SWITCHES):
        if name == "parameter" and value:  # Ollama's
            raise ValueError(f"names of settings stand alone: /set {value[:60]}")
        names = (*NUMBERS, *SWITCHES, "system")
        near = [one for one in names if one.startswith(name)] or difflib.get_close_matches(name, names, n=1)
        meant = "/set shows all settings"
        if near:
            meant = f"did you mean {near[0]}? Type /set {near[0]} {value[:40]}".rstrip()
        raise ValueError(f"there is no setting {name[:40]}; {meant}")
    if value:
        settings.set(name, value)
    return _columns([(name, settings.shown(name), settings.source(name))])


def _system(chat: Chat, argument: str) -> str:
    if chat.raw:
        raise ValueError("a system prompt needs a chat; this session completes text")
    if argument == "default":
        chat.conversation.system = None
    elif argument:
        text = argument[1:-1] if len(argument) > 1 and argument[0] == argument[-1] == '"' else argument
        chat.conversation.system = text.strip('"').strip() if argument.startswith('"""') else text
        chat.conversation.system_source = "/system"
    return _columns([("system", *_system_row(chat))])


def _system_row(chat: Chat) -> tuple[str, str]:
    system = chat.conversation.system
    if system is None:
        return "the template's, if it has one", "default"
    return f'"{one_line(system)}"', chat.conversation.system_source


def _save(chat: Chat, argument: str) -> str:
    flag, _, rest = argument.partition(" ")
    overwrite = flag == "-f"
    path = _path("save", rest if overwrite else argument)
    if not chat.conversation.turns:
        raise ValueError("there is nothing to save yet")
    chat.conversation.save(path, chat.client.info.model, overwrite=overwrite)
    return f"saved {_turns(chat.conversation)} to {path}"


def _load(chat: Chat, argument: str) -> str:
    if chat.raw:
        raise ValueError("a conversation needs a chat; this session completes text")
    path = _path("load", argument)
    chat.conversation = Conversation.load(path)
    turns = chat.conversation.turns
    last = f', the last one: "{one_line(turns[-1][0], 60)}"' if turns else ""
    return f"loaded {_turns(chat.conversation)} from {path}{last}"


def _path(command: str, argument: str) -> Path:
    try:
        words = shlex.split(argument)
    except ValueError:
        words = [argument]
    if not words:
        raise ValueError(f"/{command} needs the name of a file: /{command} chat.json")
    path = Path(words[0] if len(words) == 1 else argument)  # a name with spaces needs no quotes
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _clear(chat: Chat, argument: str) -> str:
    chat.conversation.clear()
    return "the conversation is empty" + ("; the system prompt stays" if chat.conversation.system else "")


def _stats(chat: Chat, argument: str) -> str:
    last, conversation = chat.last, chat.conversation
    rows = [] if chat.raw else [("conversation", _turns(conversation))]
    if conversation.forgotten:
        rows.append(("forgotten", f"{oldest_turns(conversation.forgotten)}, as the context is full"))
    if last is None:
        rows.append(("context", f"{chat.context} tokens"))
        return _columns(rows)
    cached = f", {last.cached_tokens} of them from the prefix cache" if last.cached_tokens else ""
    rows += [
        ("last prompt", f"{last.prompt_tokens} tokens{cached}"),
        ("last answer", last.summary()),
        ("context", f"{last.prompt_tokens + last.tokens} of {chat.context} tokens used"),
    ]
    return _columns(rows)


def _help(chat: Chat, argument: str) -> str:
    rows = [(f"/{name} {command.arguments}".rstrip(), command.purpose) for name, command in COMMANDS.items()]
    return _columns(rows) + "\n\n" + KEYS


def _leave(chat: Chat, argument: str) -> str:
    raise Leave


def _turns(conversation: Conversation) -> str:
    count = len(conversation.turns)
    return f"{count} turn{'s' * (count != 1)}"


def oldest_turns(count: int) -> str:
    """Returns the words for the `count` oldest turns."""
    return "the first turn" if count == 1 else f"the first {count} turns"


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows as lines of aligned columns. The last column may have any length."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


COMMANDS: Mapping[str, Command] = {
    "set": Command(_set, "[NAME [VALUE]]", "Show the settings, or change one; the value default undoes it"),
    "system": Command(_system, "[TEXT]", 'Show or set the system prompt; "" is an empty one, default the template\'s'),
    "save": Command(_save, "[-f] FILE", "Save the conversation; -f overwrites a file"),
    "load": Command(_load, "FILE", "Go on with a saved conversation"),
    "clear": Command(_clear, "", "Forget the conversation"),
    "stats": Command(_stats, "", "Show the speed of the last answer, and the context used"),
    "?": Command(_help, "", "Show this help"),
    "bye": Command(_leave, "", "Leave"),
}
ALIASES: Mapping[str, str] = {"help": "?", "h": "?", "exit": "bye", "quit": "bye", "q": "bye"}
