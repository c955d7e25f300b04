"""Arranges messages for templates that refuse, or leave out, some orders of roles.

Agents send several system messages, system messages in the middle, and neighbours of one role. What a template takes is
found by rendering short conversations once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penstock.text.errors import ChatTemplateError

Message = Mapping[str, Any]
Show = Callable[[Sequence[Message]], str]  # renders messages; raises ChatTemplateError

_TEXTS = ("needle-a", "needle-b", "needle-c", "needle-d", "needle-e", "needle-f")


class RoleRules(NamedTuple):
    """What a template takes. The defaults are those of a template that takes all."""

    system: Literal["anywhere", "first", "none"] = "anywhere"
    neighbours: bool = True  # two messages of one role in a row
    begins: bool = True  # the assistant may begin
    after_result: bool = True  # a user's message may follow a tool's result


TAKES_ALL = RoleRules()


def find_rules(show: Show, call: Sequence[Message]) -> RoleRules:
    """Returns what the template that `show` renders takes. `call` is a conversation that ends with a tool's result;
    empty if the template shows none."""

    def takes(*roles: str) -> bool:
        messages = [{"role": role, "content": text} for role, text in zip(roles, _TEXTS, strict=False)]
        return _shows(show, messages, _TEXTS[: len(roles)])

    if not takes("user"):
        return TAKES_ALL  # it needs more than messages, so nothing can be said about it
    after_result = not call or _shows(show, [*call, {"role": "user", "content": _TEXTS[0]}], _TEXTS[:1])
    return RoleRules(
        system=_place_of_system(takes),
        neighbours=takes("user", "user") and takes("user", "assistant", "assistant", "user"),
        begins=takes("assistant", "user"),
        after_result=after_result,
    )


def arranged(messages: Sequence[Message], rules: RoleRules) -> Sequence[Message]:
    """Returns the messages in an order that the template takes. All texts remain."""
    if rules == TAKES_ALL:
        return messages
    if rules.system != "anywhere":
        messages = _with_one_system(messages, rules.system)
    if not rules.after_result:
        messages = _merged(messages, lambda last, role: role == "user" and last == "tool")
    if not rules.neighbours:
        messages = _merged(messages, lambda last, role: role == last != "tool")
    if not rules.begins:
        at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if at < len(messages) and messages[at]["role"] == "assistant":
            messages = [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]
    return messages


def _shows(show: Show, messages: Sequence[Message], texts: Sequence[str]) -> bool:
    """True if the template takes the messages and shows all texts."""
    try:
        prompt = show(messages)
    except ChatTemplateError:
        return False
    return all(text in prompt for text in texts)


def _place_of_system(takes: Callable[..., bool]) -> Literal["anywhere", "first", "none"]:
    if not takes("system", "user"):
        return "none"
    return "anywhere" if takes("system", "system", "user", "assistant", "system", "user") else "first"


def _with_one_system(messages: Sequence[Message], place: Literal["first", "none"]) -> list[Message]:
    """Joins the system messages at the head. Later ones become the user's: at the head, each would change the whole
    prompt, which is cached up to there."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    head = "\n\n".join(message["content"] or "" for message in messages[:count])
    rest = [{**message, "role": "user"} if message["role"] == "system" else message for message in messages[count:]]
    if not count:
        return rest
    if place == "first" and rest:
        return [{**messages[0], "content": head}, *rest]
    user = {"role": "user", "content": head}
    return [_joined(user, rest[0]), *rest[1:]] if rest and rest[0]["role"] == "user" else [user, *rest]


def _merged(messages: Sequence[Message], joins: Callable[[str, str], bool]) -> list[Message]:
    """Merges each message into the one before it if `joins` says so of their roles."""
    result: list[Message] = []
    for message in messages:
        if result and joins(result[-1]["role"], message["role"]):
            result[-1] = _joined(result[-1], message)
        else:
            result.append(message)
    return result


def _joined(first: Message, second: Message) -> Message:
    """One message with the texts and the calls of both."""
    merged = {**second, **first}
    for key in ("content", "reasoning_content"):
        if texts := [text for text in (first.get(key), second.get(key)) if text]:
            merged[key] = "\n\n".join(texts)
    if calls := [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]:
        merged["tool_calls"] = calls
    return merged
