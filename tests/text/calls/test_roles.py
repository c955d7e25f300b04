"""Templates that refuse or lose some orders of roles show every message all the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.text import ChatTemplate
from penstock.text.calls import ChatFormat
from penstock.text.calls.roles import TAKES_ALL, RoleRules, arranged

LINES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + LINES
)
LOSES_LATER_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}\n{% endif %}"
    "{% endfor %}[go]"
)
KEEPS_LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}[system]{{ ns.system }}\n{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}\n"
    "{% endfor %}[go]"
)
ALTERNATING = (
    "{% set ms = messages[1:] if messages[0].role == 'system' else messages %}{% for m in ms %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}{% endfor %}" + LINES
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATING
)
NO_USER_AFTER_RESULT = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('Unexpected role user after role tool') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}[go]"
)
S, U, A = ({"role": role, "content": f"{role[0]}1"} for role in ("system", "user", "assistant"))
S2, U2, A2 = ({**message, "content": f"{message['role'][0]}2"} for message in (S, U, A))
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "r1"}


def chat_format_of(source: str) -> ChatFormat:
    return ChatFormat(
        SimpleNamespace(chat_template=ChatTemplate(source, {}), special_ids=frozenset(), special_texts={})
    )  # type: ignore


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        (LINES, TAKES_ALL),
        (SYSTEM_FIRST, RoleRules(system="first")),
        (LOSES_LATER_SYSTEM, RoleRules(system="first")),
        (KEEPS_LAST_SYSTEM, RoleRules(system="first")),
        (ALTERNATING, RoleRules(system="first", neighbours=False, begins=False)),
        (NO_SYSTEM, RoleRules(system="none", neighbours=False, begins=False)),
        (NO_USER_AFTER_RESULT, RoleRules(after_result=False)),
        ("{{ raise_exception('no') }}", TAKES_ALL),
    ],
)
def test_the_rules_are_found(source: str, rules: RoleRules) -> None:
    assert chat_format_of(source)._rules == rules


@pytest.mark.parametrize(
    ("source", "messages", "shown"),
    [
        (LINES, [S, S2, U, A, S, U2], "[system]s1\n[system]s2\n[user]u1\n[assistant]a1\n[system]s1\n[user]u2\n[go]"),
        (SYSTEM_FIRST, [S, S2, U], "[system]s1\n\ns2\n[user]u1\n[go]"),
        (SYSTEM_FIRST, [U, A, S, U2], "[user]u1\n[assistant]a1\n[user]s1\n[user]u2\n[go]"),
        (SYSTEM_FIRST, [S], "[user]s1\n[go]"),
        (LOSES_LATER_SYSTEM, [S, U, S2], "[system]s1\n[user]u1\n[user]s2\n[go]"),
        (KEEPS_LAST_SYSTEM, [S, U, A, S2, U2], "[system]s1\n[user]u1\n[assistant]a1\n[user]s2\n[user]u2\n[go]"),
        (ALTERNATING, [U, U2], "[user]u1\n\nu2\n[go]"),
        (ALTERNATING, [S, U, A, A2, U2], "[system]s1\n[user]u1\n[assistant]a1\n\na2\n[user]u2\n[go]"),
        (ALTERNATING, [S, A, U], "[system]s1\n[user]\n[assistant]a1\n[user]u1\n[go]"),
        (ALTERNATING, [U, A, S, U2], "[user]u1\n[assistant]a1\n[user]s1\n\nu2\n[go]"),
        (NO_SYSTEM, [S, S2, U, A, S, U2], "[user]s1\n\ns2\n\nu1\n[assistant]a1\n[user]s1\n\nu2\n[go]"),
        (NO_SYSTEM, [S, A, U], "[user]s1\n[assistant]a1\n[user]u1\n[go]"),
        (
            NO_USER_AFTER_RESULT,
            [U, CALLS, RESULT, U2],
            '[user]u1[assistant][TOOL_CALLS]{"x": "y"}[tool]r1\n\nu2[go]',
        ),
        # a template without calls shows results as the user's text
        (ALTERNATING, [U, CALLS, RESULT, U2], None),
    ],
)
def test_every_message_is_shown(source: str, messages: list[dict[str, Any]], shown: str | None) -> None:
    prompt = chat_format_of(source).render(messages)
    assert shown is None or prompt == shown
    assert all(message["content"] in prompt for message in messages)


def test_calls_and_reasoning_of_neighbours_are_merged() -> None:
    first, second = {**A, "reasoning_content": "hm"}, {**CALLS, "reasoning_content": "so"}
    assert arranged([U, first, second, CALLS], RoleRules(neighbours=False)) == [
        U,
        {"role": "assistant", "content": "a1", "reasoning_content": "hm\n\nso", "tool_calls": [CALL, CALL]},
    ]
    assert first == {**A, "reasoning_content": "hm"} and CALLS["tool_calls"] == [CALL]


def test_the_instruction_of_tools_is_shown_without_a_system_role() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    prompt = chat_format_of(NO_SYSTEM).render([U], tools=[tool])
    assert prompt.startswith("[user]You can call these tools") and prompt.endswith("\n\nu1\n[go]")


def test_a_message_that_is_continued_is_merged() -> None:
    prompt = chat_format_of(ALTERNATING).render([U, A, A2], add_generation_prompt=False, continue_final_message=True)
    assert prompt == "[user]u1\n[assistant]a1\n\na2"
