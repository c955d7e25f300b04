"""Runs chat templates in Jinja's immutable sandbox, with limits on time and size.

A template comes with a model, so it is an untrusted program. The sandbox keeps it from Python's objects, but a nested
loop can run for hours, and a string doubled forty times fills the memory. So every iteration of a loop and every call
checks the deadline, and operations whose result can be much larger than their operands are measured first. All other
operations grow a value by small factors only.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from penstock.text.result_sizes import FILTERS, METHODS, Measure, TooLarge, materialise, operator_size, text_size


class RenderLimits(NamedTuple):
    """Limits of one rendering."""

    seconds: float = 2.0
    size: int = 8 << 20  # characters or items of any value, and characters of the prompt


class _RenderContext(Context):
    """Adds the deadline of the rendering to a context."""

    deadline = math.inf  # of time.monotonic()

    def derived(self, locals: dict[str, Any] | None = None) -> "_RenderContext":
        """Returns the context of a scoped block."""
        context = super().derived(locals)
        if not isinstance(context, _RenderContext):
            raise TypeError(f"expected a render context, got {type(context).__name__}")
        context.deadline = self.deadline
        return context


class RenderEnvironment(ImmutableSandboxedEnvironment):
    """Provides the environment in which transformers renders chat templates, and limits time and size."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = _RenderContext

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=self._printable,
        )
        self._limits = limits
        self.check_deadline = _nothing  # every call checks the deadline; this one does nothing else
        self.join_operands = self._join_operands
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name, measure in FILTERS.items():
            self.filters[name] = self._bounded(self.filters[name], measure)

    def compile_tree(self, tree: nodes.Template) -> Template:
        """Compiles a parsed template, with a deadline check in every loop."""
        _AddDeadlineChecks().visit(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Returns the rendered text. Raises TemplateError past a limit, and the errors of the template."""
        context = template.new_context(dict(variables))
        if not isinstance(context, _RenderContext):
            raise TypeError(f"expected a render context, got {type(context).__name__}")
        context.deadline = time.monotonic() + self._limits.seconds
        parts, length = [], 0
        for part in template.root_render_func(context):
            length += len(part)
            self._check_size(length)
            parts.append(part)
        return "".join(parts)

    def concat(self, parts: Iterable[str]) -> str:  # joins the output of a macro or a block
        parts = list(parts)
        self._check_size(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_size(operator_size(operator, left, right, self._limits.size))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__context, _RenderContext) and time.monotonic() > __context.deadline:
            raise TemplateError(f"it runs longer than {__self._limits.seconds:g} s, which is the limit")
        if __obj is __self.check_deadline or __obj is __self.join_operands:
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int) and method.__name__ in METHODS:
            args = materialise(args)
            __self._check_size(METHODS[method.__name__]((owner, *args), kwargs, __self._limits.size))
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded(self, function: Callable[..., Any], measure: Measure) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja passes the environment or context first

        @functools.wraps(function)
        def bounded(*args: Any, **named: Any) -> Any:
            given = materialise(args[passed:])
            self._check_size(measure(given, named, self._limits.size))
            return function(*args[:passed], *given, **named)

        return bounded

    def _join_operands(self, *operands: Any) -> str:
        """Implements the `~` operator."""
        self._check_size(sum(text_size(operand, self._limits.size) for operand in operands))
        return "".join(map(str, operands))

    def _printable(self, value: Any) -> Any:
        text_size(value, self._limits.size)
        return value

    def _check_size(self, size: int) -> None:
        if size > self._limits.size:
            raise TooLarge(self._limits.size)


class _AddDeadlineChecks(NodeTransformer):
    """Adds a deadline check to every loop, and measures the operands of `~`. Macros are calls, which are checked."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_deadline", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_operands", node.nodes, node.lineno)


def _call(function: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    """Returns the node of a call to a method of the environment. Templates cannot name this method."""
    return nodes.Call(nodes.EnvironmentAttribute(function, lineno=line), args, [], None, None, lineno=line)


class _GenerationTag(Extension):
    """Parses `{% generation %}`, which marks the assistant's text for training, as a plain scope."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """Jinja's namespace without private names. An attribute such as `__class__` would replace the object's own."""

    def __init__(*args: Any, **named: Any) -> None:  # `self` may be a name in the namespace
        attributes = dict(*args[1:], **named)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it gives a namespace the private attribute {name!r}")


def _nothing() -> str:
    return ""


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers. Unlike Jinja's, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
