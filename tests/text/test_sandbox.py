"""A template is a stranger's program: it reaches nothing, ends in time and stays small."""

import pytest

from penstock.text import ChatTemplate, ChatTemplateError, RenderLimits

LIMITS = RenderLimits(seconds=60, size=1 << 20)
SHORT = RenderLimits(seconds=0.2, size=1 << 20)
MESSAGES = [{"role": "user", "content": "text"}]
GROW = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}{{ ns.x }}"
LOOPS = "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
HUGE = "10000000000"


def render(source: str, limits: RenderLimits = LIMITS) -> str:
    return ChatTemplate(source, {}, limits=limits).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        LOOPS.replace("in r %}", "in r recursive %}"),
        "{% block a %}" + LOOPS + "{% endblock %}",
        "{% for i in [1] %}{% block a scoped %}" + LOOPS + "{% endblock %}{% endfor %}",
        "{% macro f() %}" + LOOPS + "{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}" + LOOPS + "{% endcall %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set x %}" + LOOPS + "{% endset %}",
    ],
)
def test_a_template_that_runs_too_long_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"runs longer than 0\.2 s"):
        render(source, SHORT)


@pytest.mark.parametrize(
    "source",
    [
        GROW.replace("GROWN", "ns.x ~ ns.x"),
        GROW.replace("GROWN", "ns.x + ns.x"),
        GROW.replace("GROWN", "ns.x * 2"),
        GROW.replace("GROWN", "[ns.x, ns.x]"),
        GROW.replace("'a'", "[]").replace("GROWN", "[ns.x, ns.x]"),
        GROW.replace("GROWN", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
        GROW.replace("GROWN", "{'a': ns.x, 'b': ns.x}").replace("{{ ns.x }}", "{{ ns.x | string }}"),
        GROW.replace("GROWN", "'%s%s' % (ns.x, ns.x)"),
        GROW.replace("GROWN", "'{0}{0}'.format(ns.x)"),
        GROW.replace("GROWN", "'%s%s' | format(ns.x, ns.x)"),
        GROW.replace("GROWN", "ns.x | replace('a', 'aa')"),
        GROW.replace("GROWN", "ns.x.replace('a', 'aa')"),
        GROW.replace("GROWN", "[ns.x, ns.x] | join"),
        GROW.replace("GROWN", "''.join([ns.x, ns.x])"),
        GROW.replace("'a'", "[1]").replace("GROWN", "ns.x + ns.x"),
        GROW.replace("'a'", "[1]").replace("GROWN", "ns.x * 2"),
        GROW.replace("'a'", "10").replace("GROWN", "ns.x * ns.x"),
        "{{ 10 ** 1000000000 }}",
        f"{{{{ 'a' * {HUGE} }}}}",
        f"{{{{ [1] * {HUGE} }}}}",
        f"{{{{ 'a' | center({HUGE}) }}}}",
        f"{{{{ 'a' | indent({HUGE}, true) }}}}",
        f"{{{{ ['a'] | map('center', {HUGE}) | list }}}}",
        f"{{{{ [1] | batch({HUGE}, 'x') | list }}}}",
        f"{{{{ [1] | slice({HUGE}) | list }}}}",
        f"{{{{ [1] | tojson(indent={HUGE}) }}}}",
        f"{{{{ 'a'.ljust({HUGE}) }}}}",
        f"{{{{ '\t'.expandtabs({HUGE}) }}}}",
        f"{{{{ 'a'.encode().zfill({HUGE}) }}}}",
        f"{{{{ (1).to_bytes({HUGE}, 'big') }}}}",
        "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
        "{{ ('a b ' * 9999) | wordwrap(1, wrapstring='b' * 9999) }}",
        "{{ range(9999) | join('b' * 9999) }}",
        "{{ ('b' * 9999).join(range(9999) | map('string')) }}",
        "{% for i in range(9999) %}{{ 'b' * 999 }}{% endfor %}",
        "{% set x %}{% for i in range(9999) %}{{ 'b' * 999 }}{% endfor %}{% endset %}",
        "{% macro f() %}{% for i in range(999) %}{{ 'b' * 9999 }}{% endfor %}{% endmacro %}{% set x = f() %}",
    ],
)
def test_a_template_that_makes_too_much_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="makes a value of more than"):
        render(source)


@pytest.mark.parametrize("source", [f"{{{{ '%{HUGE}d' % 1 }}}}", f"{{{{ '{{:{HUGE}}}'.format(1) }}}}"])
def test_wide_fields_are_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="a width of 10000 or more"):
        render(source)


@pytest.mark.parametrize("source", [f"{{{{ '%*d' % ({HUGE}, 1) }}}}", f"{{{{ '{{:{{}}}}'.format(1, {HUGE}) }}}}"])
def test_computed_field_widths_are_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="to a computed width"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].mro() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ check_deadline() }}",
        "{{ lipsum(n=1) }}",
        "{% include 'other' %}",
        "{{ range(10000000) }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_may_not_do_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_each_rendering_has_its_own_time() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{% endfor %}done", {}, limits=RenderLimits(seconds=5))
    assert [template.render(MESSAGES) for _ in range(3)] == ["done"] * 3


def test_long_conversations_fit() -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{% endfor %}", {})
    chat = [{"role": "user", "content": "word " * 10_000}] * 100
    assert len(template.render(chat)) == 100 * (len("<user>") + 49_999)
