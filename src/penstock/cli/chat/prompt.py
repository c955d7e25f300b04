"""Reads messages from a terminal: editing, several lines, history and completion, with prompt_toolkit."""

import os
from collections.abc import Callable, Iterable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from penstock.cli.chat.commands import COMMANDS
from penstock.cli.chat.entry import ends_in_backslash, goes_on
from penstock.cli.chat.history import HistoryFile, history_path
from penstock.cli.chat.settings import NUMBERS, SWITCHES

PROMPT, MORE = ">>> ", "... "
PLACEHOLDER = "Type a message, or /? for help"


class Prompt:
    def __init__(self, keeps_history: Callable[[], bool]) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=[("class:prompt", PROMPT)],
            prompt_continuation=FormattedText([("class:prompt", MORE)]),
            placeholder=_placeholder,
            multiline=True,
            key_bindings=_keys(),
            history=PromptHistory(HistoryFile(history_path(os.environ)), keeps_history),
            completer=CommandCompleter(),
            complete_while_typing=True,
            enable_suspend=True,
            reserve_space_for_menu=4,
            style=Style.from_dict({"prompt": "bold", "placeholder": "ansibrightblack"}),
            output=create_output(always_prefer_tty=True),  # if answers go to a file, the prompt is on standard error
        )

    async def read(self) -> str:
        """Returns the lines of one message. Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C."""
        return await self._session.prompt_async()


def _placeholder() -> FormattedText:
    """Returns what an empty line shows. It does not stay on the screen after the line has ended."""
    return FormattedText([] if get_app().is_done else [("class:placeholder", PLACEHOLDER)])


class PromptHistory(History):
    """Earlier messages, from the file and from this session."""

    def __init__(self, file: HistoryFile, keeps: Callable[[], bool]) -> None:
        super().__init__()
        self._file, self._keeps = file, keeps

    def load_history_strings(self) -> Iterable[str]:
        """Returns the newest message first."""
        return reversed(self._file.load()) if self._keeps() else ()

    def store_string(self, string: str) -> None:
        if self._keeps():
            self._file.append(string)


class CommandCompleter(Completer):
    """Completes the names of commands, of settings and of files."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, gap, argument = text.partition(" ")
        if not gap:
            for name, known in COMMANDS.items():
                if name.startswith(command[1:]):
                    yield Completion(f"/{name}", -len(command), display_meta=known.purpose)
        elif command in ("/save", "/load"):
            argument = argument.removeprefix("-f ").lstrip()
            yield from self._paths.get_completions(Document(argument, len(argument)), complete_event)
        elif command == "/set":
            yield from _setting(argument)


def _setting(argument: str) -> Iterator[Completion]:
    name, gap, value = argument.partition(" ")
    begun, choices = name, [*NUMBERS, *SWITCHES, "system"]
    if gap:
        begun, choices = value, ["on", "off", "default"] if name in SWITCHES else ["default"]
    for choice in choices:
        if choice.startswith(begun) and choice != begun:
            yield Completion(choice, -len(begun))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not goes_on(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.document.is_cursor_at_the_end and ends_in_backslash(buffer.text):
            buffer.delete_before_cursor()
        buffer.newline(copy_margin=False)

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text:
            buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
