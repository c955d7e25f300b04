"""Pipelines: what their check at load refuses, and what switches, splits, merges and streams give."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import RequestRejected
from penstock.messages.arrays import read_array, tensor_of
from penstock.messages.tensors import InferRequest, InferResult, LoadFailed, Tensor, TensorSpec
from penstock.repository.entry import Folder, Target
from penstock.repository.oneshot import Emit, OneShotModel
from penstock.repository.pipelines.expression import Expression, ExpressionError, names_in
from penstock.repository.pipelines.pipeline import load_pipeline
from penstock.repository.service import Repository
from penstock.repository.settings import SettingsError, read_yaml
from penstock.repository.statistics import ModelStatistics
from tests.repository.onnx_files import put

SPECS = {
    "score": TensorSpec("score", "FP32", (-1, 1)),
    "scores": TensorSpec("scores", "FP32", (-1, 3)),
    "text": TensorSpec("text", "BYTES", (-1, 1)),
    "flag": TensorSpec("flag", "BOOL", (-1, 1)),
}
ROW = {"score": [0.5], "scores": [1.0, 2.0, 3.0], "text": ["an urgent matter"], "flag": [True]}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("score > 0.4", True),
        ("score >= 0.5 and flag", True),
        ("not flag or max(scores) == 2", False),
        ("mean(scores) * 2 - 1 == 3", True),
        ('"urgent" in text and length(text) > 3', True),
        ("scores[2] / scores[0] == 3", True),
        ("sum(scores) != 6", False),
        ("-score < -0.4", True),
    ],
)
def test_expressions(text: str, result: bool) -> None:
    assert Expression(text, SPECS, has_rows=True).holds(ROW) is result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score", "it gives a number"),
        ("other > 1", "no tensor 'other'"),
        ("text > 1", "is not possible"),
        ("scores > 1", "is not possible"),
        ("__import__('os').system('true') == 0", "is not possible"),
        ("(lambda: True)()", "is not possible"),
        ("[x for x in scores] == 1", "is not possible"),
        ("text.__class__ == 1", "is not possible"),
        ("2 ** 99 > score", "is not possible"),
        ("0 < score < 1", "is not possible"),
        ("max(score, score) > 1", "is not possible"),
        ("score >", "cannot be read"),
        ("(" * 300 + "score" + ")" * 300, "cannot be read"),
        ("-" * 200 + "score > 0", "nested"),
        ("score > " + "1" * 1000, "1008 characters"),
    ],
)
def test_expressions_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        Expression(text, SPECS, has_rows=True)


@given(st.text(alphabet="scoretx maxlngth()[]<>=!+-*/.,'\"0123456789andorif:lambda\n", max_size=60))
def test_any_text_is_an_expression_or_is_refused(text: str) -> None:
    try:
        names_in(text)
        Expression(text, SPECS, has_rows=True).holds(ROW)
    except ExpressionError:
        pass


def test_an_expression_that_cannot_be_computed() -> None:
    expression = Expression("scores[7] > score / (score - score)", SPECS, has_rows=True)
    with pytest.raises(ExpressionError, match="cannot be computed"):
        expression.holds(ROW)


class Model:
    """A member that computes with arrays."""

    streams = False

    def __init__(self, inputs: dict[str, Any], outputs: dict[str, Any], run: Callable[..., Any]) -> None:
        self.inputs, self.outputs = (
            tuple(TensorSpec(name, *facts) for name, facts in specs.items()) for specs in (inputs, outputs)
        )
        self._run = run
        self.rows: list[int] = []  # of each request

    async def infer(self, request: InferRequest) -> InferResult:
        arrays = {each.name: read_array(each.data, each.datatype, each.shape) for each in request.inputs}
        self.rows.append(len(next(iter(arrays.values()))))
        await asyncio.sleep(0)
        made = self._run(**arrays)
        return InferResult(outputs=[tensor_of(self.outputs[0].name, self.outputs[0].datatype, made)])

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        yield await self.infer(request)


class Writer(Model):
    """A member that streams the words of a text."""

    streams = True

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        (result,) = (await self.infer(request)).outputs
        (text,) = read_array(result.data, "BYTES", (1,))
        for word in text.split(" "):
            yield InferResult(outputs=[tensor_of("y", "BYTES", np.array([[word + " "]], object))], final=False)
            await asyncio.sleep(0)
        yield InferResult(outputs=[])


F, B = ("FP32", (-1, 2)), ("BYTES", (-1, 1))
MODELS = {
    "double": Model({"x": F}, {"y": F}, lambda x: x * 2),
    "negate": Model({"x": F}, {"y": F}, lambda x: -x),
    "writer": Writer({"x": B}, {"y": B}, lambda x: np.array([["so " + x[0, 0]]], object)),
    "shorter": Model({"x": B}, {"y": B}, lambda x: np.array([[text[:2] for text in row] for row in x], object)),
    "fails": Model({"x": F}, {"y": F}, lambda x: 1 / 0),
}


def pipeline(text: str, rows: int = 8) -> OneShotModel:
    settings = read_yaml(f"max-batch-size: {rows}\n{text}")
    target = Target("chain", 1, "", 0, Path(), settings)
    return load_pipeline(target, lambda name, version, kind: MODELS.get(name))


class DoubleRunner:
    """See Runner: each request runs at once."""

    note, size, batcher, streams = "", 0, None, False

    async def run(self, request: InferRequest, rows: int, emit: Emit | None = None) -> InferResult:
        return await MODELS["double"].infer(request)

    async def close(self) -> None:
        pass


def test_a_member_stays_until_its_pipeline_is_loaded(tmp_path: Path) -> None:
    put(tmp_path, "double", b"")
    put(
        tmp_path,
        "chain",
        b"",
        settings=f"max-batch-size: 8\n{ENDS}  - {{model: double, inputs: {{x: X}}, outputs: {{y: Y}}}}",
    )

    async def load_while_the_member_is_unloaded() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def load(target: Target) -> OneShotModel:
            begun.set()
            await may_end.wait()
            member = MODELS["double"]
            return OneShotModel(target, member.inputs, member.outputs, 8, DoubleRunner(), ModelStatistics())

        repository = Repository(Folder(tmp_path), {"onnx": load})
        loading = asyncio.create_task(repository.load("chain"))
        await begun.wait()
        unloading = asyncio.create_task(repository.unload("double"))
        await asyncio.sleep(0)
        may_end.set()
        await loading  # raises LoadFailed if the member has gone
        await unloading
        assert repository.ready() == []
        await repository.close()

    asyncio.run(load_while_the_member_is_unloaded())


def x(*rows: Sequence[float]) -> Tensor:
    return tensor_of("X", "FP32", np.array(rows, np.float32))


def run(made: OneShotModel, *inputs: Tensor) -> Any:
    result = asyncio.run(made.infer(InferRequest(inputs=list(inputs))))
    (output,) = result.outputs
    return read_array(output.data, output.datatype, output.shape).tolist()


ENDS = """
inputs: [{name: X, datatype: FP32, dims: [2]}]
outputs: [{name: Y, datatype: FP32, dims: [-1]}]
steps:
"""
SWITCH = (
    ENDS
    + """
  - switch: X[0] > 0
    then: [{model: double, inputs: {x: X}, outputs: {y: Y}}]
    else: [{model: negate, inputs: {x: X}, outputs: {y: Y}}]
"""
)


def test_a_switch_sends_each_row_to_its_branch() -> None:
    made = pipeline(SWITCH)
    for model in MODELS.values():
        model.rows.clear()
    assert run(made, x([1, 2], [-1, 2], [3, 4])) == [[2, 4], [1, -2], [6, 8]]
    assert (MODELS["double"].rows, MODELS["negate"].rows) == ([2], [1])
    assert run(made, x([1, 1])) == [[2, 2]] and MODELS["negate"].rows == [1]


def test_a_tensor_is_split_and_merged() -> None:
    made = pipeline(
        ENDS
        + """
  - {model: double, inputs: {x: X}, outputs: {y: twice}}
  - {split: twice, into: {left: 1, right: 1}}
  - {merge: Y, of: [right, left, X]}
"""
    )
    assert run(made, x([1, 2])) == [[4, 2, 1, 2]]


TEXT = """
inputs: [{name: T, datatype: BYTES, dims: [1]}]
outputs: [{name: WHOLE, datatype: BYTES, dims: [1]}, {name: CUT, datatype: BYTES, dims: [1]}]
steps:
  - {model: writer, inputs: {x: T}, outputs: {y: WHOLE}}
  - {model: shorter, inputs: {x: WHOLE}, outputs: {y: CUT}}
"""


def test_a_stream_has_pieces_and_then_the_other_outputs() -> None:
    made = pipeline(TEXT)

    async def collect() -> list[tuple[bool, dict[str, str]]]:
        request = InferRequest(inputs=[tensor_of("T", "BYTES", np.array([["it is"]], object))])
        return [
            (result.final, {each.name: bytes(each.data[4:]).decode() for each in result.outputs})
            async for result in made.stream(request)
        ]

    *pieces, last = asyncio.run(collect())
    assert len(pieces) > 1 and not any(final for final, _ in pieces)
    assert "".join(piece["WHOLE"] for _, piece in pieces) == "so it is "
    assert last == (True, {"CUT": "so"})


def test_a_step_that_fails_ends_the_request_and_its_stream() -> None:
    made = pipeline(ENDS + "  - {model: fails, inputs: {x: X}, outputs: {y: Y}}")
    request = InferRequest(inputs=[x([1, 2])])
    with pytest.raises(ZeroDivisionError):
        asyncio.run(made.infer(request))

    async def stream() -> None:
        async for _ in made.stream(request):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(stream())
    assert made.usage.requests == 0


def test_rows_of_different_branches_do_not_stream() -> None:
    made = pipeline(SWITCH)

    async def stream() -> None:
        async for _ in made.stream(InferRequest(inputs=[x([1, 2], [-1, 2])])):
            pass

    with pytest.raises(RequestRejected, match="send one row"):
        asyncio.run(stream())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("- {model: nowhere, inputs: {x: X}, outputs: {y: Y}}", "there is no such one-shot or language model"),
        ("- {tokenize: nowhere, inputs: {x: X}, outputs: {y: Y}}", "there is no such model with a tokenizer"),
        ("- {model: double, inputs: {x: Y}, outputs: {y: Y}}", "in a circle"),
        ("- {model: double, inputs: {z: X}, outputs: {y: Y}}", "input 'x' is not mapped"),
        ("- {model: double, inputs: {x: X}, outputs: {z: Y}}", "has no output 'z'"),
        ("- {model: double, inputs: {x: X}, outputs: {y: Z}}", "output 'Y' is made by no step"),
        ("- {model: double, inputs: {x: X}, outputs: {y: X}}", "'X' is made twice"),
        ("- {model: shorter, inputs: {x: X}, outputs: {y: Y}}", "is BYTES, but gets FP32"),
        ("- {split: X, into: {Y: 1, Z: 2}}", "its parts need 3 columns"),
        ("- {split: X, into: {Y: 0}}", "at least 1"),
        ("- {merge: Y, of: []}", "needs tensors"),
        ("- {switch: X > 1, then: [], else: []}", "must make a tensor of the same name"),
        ("- {switch: X > 1, then: [{merge: Y, of: [X]}], else: [{merge: Y, of: [X]}]}", "is not possible"),
        ("- {switch: Z > 1, then: [{merge: Y, of: [X]}], else: [{merge: Y, of: [X]}]}", "'Z' is made by no step"),
        ("- {switch: 1 > 0, then: [{merge: Y, of: [X]}], else: [{merge: Y, of: [X]}]}", "names no tensor"),
    ],
)
def test_graphs_that_are_refused(steps: str, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        pipeline(ENDS + steps)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("{inputs: {x: X}}", "no kind"),
        ("{model: a, switch: X > 1}", "model and switch"),
        ("{split: X, of: [Y]}", "split has of"),
        ("{modle: a}", "modle"),
    ],
)
def test_steps_that_are_refused(step: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_yaml(f"steps: [{step}]")
