"""Runs the command line. A wrong use of it is one line that names the value, what is possible, and what to type."""

import copy
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from penstock.declared.settings import SETTINGS

# Other programs' names of commands, and Penstock's.
MEANT = {
    "chat": "run",
    "delete": "rm",
    "download": "pull",
    "help": "--help",
    "info": "show",
    "ls": "list",
    "remove": "rm",
    "start": "serve",
    "stats": "top",
    "version": "--version",
}
# Commands of other programs that Penstock does not have, and what to do instead.
DONE_OTHERWISE = {"create": "name the GGUF file or the folder itself: penstock serve ./model.gguf"}
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)


class PlainUsage(TyperCommand):
    """A command with a required argument: its line of usage has NAME, where typer since 0.29 writes {NAME}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]


class WrongUse(ValueError):
    """The command line is wrong; the message is one line that says what to type."""


def run_app(app: typer.Typer, arguments: Sequence[str], obj: object = None) -> int:
    """Runs a command. Returns its exit status. Raises WrongUse, and what the command raises."""
    if list(arguments[:2]) == ["plan", "fleet"]:
        arguments = ["plan fleet", *arguments[2:]]  # `plan` itself takes a model, so it is no group of commands
    root = root_of(app, arguments[0] if arguments else "")
    _check_repeats(root, arguments)
    try:
        status = root.main(list(arguments), obj=obj, prog_name="penstock", standalone_mode=False)
    except typer.Abort:
        return 1
    except Exception as error:
        # typer has had its own copy of click's exceptions since 0.26, so they are known by what they have in common.
        if not hasattr(error, "format_message"):
            raise
        raise WrongUse(_explain(error, root_of(app), arguments)) from None
    return status if isinstance(status, int) else 0


def root_of(app: typer.Typer, name: str = "") -> Any:
    """Returns the command that has all others. If one is called `name`, it has that one alone: all flags of all
    commands take longer to make than a small command takes to run."""
    alone = [
        each for each in app.registered_commands if each.callback and name == (each.name or each.callback.__name__)
    ]
    if alone:
        app = copy.copy(app)
        app.registered_commands, app.registered_groups = alone, []
    return typer.main.get_command(app)


def _check_repeats(root: Any, arguments: Sequence[str]) -> None:
    """Raises WrongUse if a flag whose value is a text is given twice: both may be meant, but only one would count. Of
    numbers and choices the last one holds, as in other programs."""
    path, command = command_of(root, arguments)
    words = list(arguments[len(path.split()) - 1 :])
    # With the root's settings: a command keeps the names of its help flag from the first context that asks for them.
    context = command.context_class(command, info_name=path, resilient_parsing=True, **root.context_settings)
    try:
        _, _, given = command.make_parser(context).parse_args(words)
    except Exception:  # a wrong use, which the command itself explains
        return
    for param in given:
        if given.count(param) > 1 and _is_one_text(param):
            flag, kind = _name(param), str(param.metavar or "")
            commas = ", or put commas between the values" if kind in ("NAME,...", "NAMES") else ""
            raise WrongUse(f"{flag} is given {_times(given.count(param))}, but one value counts: leave one out{commas}")


def _is_one_text(param: Any) -> bool:
    if _is_argument(param) or param.is_flag or param.multiple:
        return False
    if (setting := SETTINGS.get(param.name)) is not None:
        return setting.kind.name == "text"
    described = getattr(param, "type_descriptor", None)  # typer's; before 0.26 it was click's `type`
    return bool(param.type.name == "text" if described is None else described.annotation is str)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _explain(error: Any, root: Any, arguments: Sequence[str]) -> str:
    """Returns the message for an exception of click's. `root` is the command that has all others."""
    path, command = command_of(root, arguments)
    hint = f"try {path} --help"
    kind, message = type(error).__name__, " ".join(error.message.split()).rstrip(".")
    if kind == "NoSuchOption":
        return _no_such_option(error.option_name, root, arguments)
    if wrong := re.match(r"No such command '(.*?)'(?:$|\.)", message):
        return _no_such_command(wrong[1], path, list(command.commands))
    if kind == "BadParameter" and error.param is not None:
        name = _name(error.param)
        value = _value(error.param, arguments)
        return f"{name} is {value!r}: {_wanted(error.param, message, value)}; {hint}"
    if kind == "MissingParameter":
        return f"{path} needs {_name(error.param)}: {hint}"
    if flag := re.match(r"Option '(\S+)' requires an argument", message):
        return f"{flag[1]} needs a value; {hint}"
    if flag := re.match(r"Option '(\S+)' does not take a value", message):
        return f"{flag[1]} takes no value: write {flag[1]} alone; {hint}"
    extra = _EXTRA.match(message)
    if extra and path == "penstock serve":
        other = extra[1].split()[0]
        return (
            f"{path} takes one model, so {other!r} is one too many. For several, make a folder for each in a folder "
            f"models, with a file model.yaml that has the line 'model: {other}', and run penstock serve --repository "
            f"models; or start a second server: penstock serve {other} --port 8001"
        )
    if extra:
        return (
            f"{path} does not take {extra[1]!r} after what comes before it: put quotation marks around a text with "
            f"spaces; {hint}"
        )
    return f"{error.format_message().rstrip('.')}; {hint}"


def command_of(root: Any, arguments: Sequence[str]) -> tuple[str, Any]:
    """Returns the command that the arguments name, and its path: "penstock bench serve"."""
    path, command = "penstock", root
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        path, command = f"{path} {word}", command.commands[word]
    return path, command


def _no_such_option(option: str, root: Any, arguments: Sequence[str]) -> str:
    path, command = command_of(root, arguments)
    others = [name for name, other in _all_commands(root, "penstock") if option in flags_of(other)]
    if command is root and others:  # "penstock --port 80 serve"
        named = next((name for name in others if name.split()[-1] in arguments), others[0])
        return f"{option} comes after the command: {named} {option} ..."
    arguments_of = {f"--{param.name}": _name(param) for param in getattr(command, "params", ()) if _is_argument(param)}
    if option in arguments_of:
        return f"{path} has no flag {option}: write {path} {arguments_of[option]}"
    if others:
        return f"{path} has no flag {option}, which is a flag of {' and '.join(others)}; try {path} --help"
    flags = flags_of(command)
    near = [flag for flag in flags if len(option) > 3 and flag.startswith(option)] or difflib.get_close_matches(
        option.lstrip("-"), [flag.lstrip("-") for flag in flags], n=1
    )
    if near:
        return f"{path} has no flag {option}; did you mean {' or '.join('--' + name.lstrip('-') for name in near)}?"
    return f"{path} has no flag {option}; try {path} --help"


def _no_such_command(word: str, path: str, known: Sequence[str]) -> str:
    if path == "penstock" and word in MEANT:
        return f"penstock has no command {word!r}; write penstock {MEANT[word]}"
    if path == "penstock" and word in DONE_OTHERWISE:
        return f"penstock has no command {word!r}: {DONE_OTHERWISE[word]}"
    is_path = "/" in word or word.endswith(".gguf")
    near = [] if is_path else difflib.get_close_matches(word, known, n=1)
    if near:
        return f"{path} has no command {word!r}; did you mean {path} {near[0]}?"
    if path == "penstock" and (is_path or Path(word).exists()):
        return f"{word!r} is not a command; to use a model, name the command first: penstock serve {word}"
    return f"{path} has no command {word!r}; there are: {', '.join(known)}"


def _all_commands(command: Any, path: str) -> list[tuple[str, Any]]:
    """Returns the commands below a group, each with its path."""
    found = []
    for name, child in getattr(command, "commands", {}).items():
        found += [(f"{path} {name}", child), *_all_commands(child, f"{path} {name}")]
    return found


def flags_of(command: Any) -> list[str]:
    """Returns the flags of a command, --help among them."""
    own = [flag for param in command.params if not _is_argument(param) for flag in (*param.opts, *param.secondary_opts)]
    return [*own, "--help"]


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _name(param: Any) -> str:
    return str(param.metavar or param.name.upper()) if _is_argument(param) else str(max(param.opts, key=len))


def _value(param: Any, arguments: Sequence[str]) -> str:
    for at in range(len(arguments) - 1, -1, -1):
        flag, equals, value = arguments[at].partition("=")
        if flag in param.opts:
            return value if equals or at + 1 == len(arguments) else arguments[at + 1]
    return ""


def _wanted(param: Any, message: str, value: str) -> str:
    """Returns what a flag takes: "give a whole number from 1 on"."""
    described = getattr(param, "type_descriptor", None)  # typer's; before 0.26 it was click's `type`
    limits = param.type if described is None else described.parameter_info
    if described is None:
        kind = {"integer": int, "float": float}.get(param.type.name.split()[0])
    else:
        kind = described.annotation
    if kind not in (int, float):
        return message[0].lower() + message[1:]
    from penstock.config.sizes import without_unit  # not above: a Tab must not wait for it

    return f"give {_number(kind is int, limits.min, limits.max)}{without_unit(value)}"


def _number(whole: bool, least: float | None, most: float | None) -> str:
    """Returns the description of a range: "a whole number from 1 to 64"."""
    what = "a whole number" if whole else "a number"
    start = "" if least is None else f" from {least}"
    end = "" if most is None else f" {'up ' if least is None else ''}to {most}"
    return what + start + (end or (" on" if start else ""))


def main(app: typer.Typer, obj: object = None) -> None:
    """Runs the command line of this process and exits. An error for the user is one line, not a traceback."""
    try:
        sys.exit(run_app(app, sys.argv[1:], obj))
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(status)


def _status(error: Exception) -> int | None:
    """Returns the exit status for an error that is shown without a traceback, or None for a bug."""
    from penstock.messages import EngineError
    from penstock.weights.gguf_choice import HubFailure

    if isinstance(error, OSError | EngineError | HubFailure):  # a full disk, a closed terminal, an engine that died
        return 1
    if isinstance(error, ValueError):  # a wrong setting, model or checkpoint
        return 2
    return None
