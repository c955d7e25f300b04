"""The conditions of switches: a small language with Python's syntax, of which nothing is executed by Python.

    score > 0.5 and length(TEXT) < 200
    max(scores) >= 0.9 or "urgent" in TEXT

A name is a tensor. Its value for a row is a number, a truth value or a text; a list if a row may have several elements.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.messages.tensors import LoadFailed, TensorSpec

MAX_CHARS = 1000
MAX_DEPTH = 32  # of nested parts
_SHOWN = 200  # characters of an expression in an error

Row = Mapping[str, Any]  # the values of a row, by tensor
_Compute = Callable[[Row], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# What each function takes, what it returns, and how it computes that.
_FUNCTIONS: Mapping[str, tuple[tuple[str, ...], str, Callable[[Any], Any]]] = {
    "length": (("text", "numbers", "texts"), "number", len),
    "max": (("numbers",), "number", max),
    "min": (("numbers",), "number", min),
    "sum": (("numbers",), "number", math.fsum),
    "mean": (("numbers",), "number", lambda values: math.fsum(values) / len(values)),
    "any": (("numbers",), "bool", any),
    "all": (("numbers",), "bool", all),
}


class ExpressionError(LoadFailed):
    """An expression cannot be used, or cannot be computed for a row of a request. The message says why."""


class _TypedPart(NamedTuple):
    kind: str  # number, bool, text, numbers or texts
    compute: _Compute


class Expression:
    """A condition on the rows of tensors."""

    def __init__(self, text: str, tensors: Mapping[str, TensorSpec], *, has_rows: bool) -> None:
        """`tensors` are those that it may name. `has_rows`: their first dimension is the batch.

        Raises ExpressionError.
        """
        self.text = text
        self._tensors, self._has_rows = tensors, has_rows
        try:
            part = self._part(_tree(text), 0)
        except RecursionError:
            raise self._error("it is nested too deeply; make it simpler") from None
        if part.kind != "bool":
            raise self._error(f"it gives a {part.kind}; it must be true or false: compare it with something")
        self._compute = part.compute

    def holds(self, row: Row) -> bool:
        """Returns whether it is true for a row. Raises ExpressionError."""
        try:
            return bool(self._compute(row))
        except (ArithmeticError, ValueError, IndexError) as error:
            raise self._error(f"it cannot be computed: {error}") from None

    def _error(self, why: str) -> ExpressionError:
        return ExpressionError(f"expression {self.text[:_SHOWN]!r}: {why}")

    def _part(self, node: ast.AST, depth: int) -> _TypedPart:
        if depth > MAX_DEPTH:
            raise self._error(f"it is nested more than {MAX_DEPTH} deep; make it simpler")
        below = [self._part(each, depth + 1) for each in _operands(node)]
        kinds, computes = [part.kind for part in below], [part.compute for part in below]
        match node:
            case ast.Name():
                return self._tensor(node.id)
            case ast.Constant(value=bool() | int() | float() | str()):
                value = node.value
                kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
                return _TypedPart(kind, lambda row: value)
            case ast.BoolOp() if set(kinds) == {"bool"}:
                combine = all if isinstance(node.op, ast.And) else any
                return _TypedPart("bool", lambda row: combine(compute(row) for compute in computes))
            case ast.UnaryOp(op=ast.Not()) if kinds == ["bool"]:
                return _TypedPart("bool", lambda row: not computes[0](row))
            case ast.UnaryOp(op=ast.USub()) if kinds == ["number"]:
                return _TypedPart("number", lambda row: -computes[0](row))
            case ast.BinOp() if kinds == ["number", "number"] and type(node.op) in _ARITHMETIC:
                apply = _ARITHMETIC[type(node.op)]
                return _TypedPart("number", lambda row: apply(computes[0](row), computes[1](row)))
            case ast.Compare(ops=[ast.In()]) if kinds in (["text", "text"], ["text", "texts"]):
                return _TypedPart("bool", lambda row: computes[0](row) in computes[1](row))
            case ast.Compare(ops=[op]) if type(op) in _COMPARISONS and kinds in (["number"] * 2, ["text"] * 2):
                compare = _COMPARISONS[type(op)]
                return _TypedPart("bool", lambda row: compare(computes[0](row), computes[1](row)))
            case ast.Subscript(slice=ast.Constant(value=int() as place)) if kinds[0] in ("numbers", "texts"):
                return _TypedPart(kinds[0].removesuffix("s"), lambda row: computes[0](row)[place])
            case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
                takes, gives, function = _FUNCTIONS[name]
                if len(kinds) == 1 and kinds[0] in takes and not node.keywords:
                    return _TypedPart(gives, lambda row: function(computes[0](row)))
        raise self._error(f"{ast.unparse(node)[:60]!r} is not possible{f' with {kinds}' if kinds else ''}")

    def _tensor(self, name: str) -> _TypedPart:
        spec = self._tensors.get(name)
        if spec is None:
            raise self._error(f"there is no tensor {name[:60]!r}; there are {', '.join(sorted(self._tensors))}")
        kind = {"BYTES": "text", "BOOL": "bool"}.get(spec.datatype, "number")
        if all(size == 1 for size in spec.shape[1 if self._has_rows else 0 :]):
            return _TypedPart(kind, lambda row: row[name][0])
        return _TypedPart("texts" if kind == "text" else "numbers", lambda row: row[name])


def _operands(node: ast.AST) -> list[ast.expr]:
    """The parts of a node that are computed before it."""
    match node:
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp():
            return [node.operand]
        case ast.BinOp():
            return [node.left, node.right]
        case ast.Compare(comparators=[right]):
            return [node.left, right]
        case ast.Subscript():
            return [node.value]
        case ast.Call():
            return node.args
    return []


def names_in(text: str) -> frozenset[str]:
    """Returns the tensors that an expression names. Raises ExpressionError if it cannot be read."""
    nodes = list(ast.walk(_tree(text)))
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in functions)


def _tree(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises ExpressionError."""
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"an expression has {len(text)} characters; the limit is {MAX_CHARS}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(
            f"expression {text[:_SHOWN]!r} cannot be read: check parentheses, quotes and operators"
        ) from None
