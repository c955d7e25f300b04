"""Archives of torch.export: what they compute, and what is refused before anything of it runs."""

import json
import pickle
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # imports with eval, which `load` traps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.repository.backend.files import HostileFile
from penstock.repository.backend.torch_model import TorchModel
from penstock.repository.backend.wire import LoadModel
from tests.repository.torch_files import meta, node, scale_program, tensor, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch")


def trap(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pickle or an expression was read")


def load(path: Path) -> TorchModel:
    """Loads a model while nothing can be unpickled, and no text evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        for target in ("torch.load", "pickle.loads", "pickle.load", "sympy.sympify", "builtins.eval"):
            patch.setattr(target, trap)
        return TorchModel(LoadModel(1, str(path), str(path.parent), -1, (), (), 1))


def test_a_small_archive(folder: Path) -> None:
    model = load(write(folder / "scale.pt2", scale_program(), (1, 2, 3, 4)))
    assert (model.inputs[0].name, model.inputs[0].shape, model.outputs[0].name) == ("x", (-1, 4), "OUTPUT__0")
    assert model.max_rows == 32 and model.note == ""
    (found,) = model.run({"x": np.ones((2, 4), np.float32)})
    assert found.tolist() == [[1, 2, 3, 4]] * 2
    fixed = load(write(folder / "fixed.pt2", scale_program(2)))
    assert fixed.max_rows == 0 and fixed.note == "there is no batch dimension"


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2),
            torch.nn.AdaptiveAvgPool2d(1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.layers(x).flatten(1)
        return made, made.softmax(-1)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embed(ids), src_key_padding_mask=mask == 0)
        split = hidden.reshape(hidden.shape[0], hidden.shape[1], 2, -1).mean(2).repeat(1, 1, 2)
        weight = mask[..., None].to(hidden.dtype)
        return self.head((split * weight).sum(1) / weight.sum(1).clamp(min=1e-9))


def test_models_that_pytorch_exports_give_its_results(folder: Path) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
    images = torch.randn(2, 3, 8, 8)
    ids, mask = torch.randint(0, 50, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    cases: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any, dict[str, Any]]] = [
        (Convolution(), (images,), ({0: batch},), {"x": random.standard_normal((5, 3, 8, 8)).astype(np.float32)}),
        (
            Encoder(),
            (ids, mask),
            ({0: batch, 1: length}, {0: batch, 1: length}),
            {"ids": random.integers(0, 50, (3, 9)), "mask": np.array([[1] * 9, [1] * 4 + [0] * 5, [1] * 7 + [0] * 2])},
        ),
    ]
    for module, sample, shapes, inputs in cases:
        module.eval()
        path = folder / f"{type(module).__name__}.pt2"
        torch.export.save(torch.export.export(module, sample, dynamic_shapes=shapes), path)
        model = load(path)
        assert tuple(inputs) == tuple(spec.name for spec in model.inputs) and model.max_rows == 32
        with torch.no_grad():
            expected = module(*(torch.from_numpy(array) for array in inputs.values()))
        for found, wanted in zip(
            model.run(inputs), expected if isinstance(expected, tuple) else [expected], strict=True
        ):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


def changed(change: Callable[[Any], None]) -> dict[str, Any]:
    program = deepcopy(scale_program())
    change(program)
    return program


def target(name: str) -> Callable[[Any], None]:
    return lambda program: program["graph_module"]["graph"]["nodes"][0].update(target=name)


def first_input(argument: dict[str, Any]) -> Callable[[Any], None]:
    return lambda program: program["graph_module"]["graph"]["nodes"][0]["inputs"][0].update(arg=argument)


def spec(kind: str, fields: dict[str, Any], which: str = "input_specs") -> Callable[[Any], None]:
    def change(program: Any) -> None:
        program["graph_module"]["signature"][which][0] = {kind: fields}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (target("os.system"), "operator 'os.system'"),
        (target("builtins.eval"), "operator 'builtins.eval'"),
        (target("torch.ops.mine.custom.default"), "operator 'torch.ops.mine"),
        (target("torch.ops.aten.from_file.default"), "from_file"),
        (target("torch.ops.aten.__class__.mro"), "__class__"),
        (target("torch.ops.higher_order.cond"), "control flow"),
        (target("_operator.pow"), "_operator.pow"),
        (target("torch.ops.aten.mul_.Tensor"), "mul_"),
        (target("torch.ops.aten.relu_.default"), "changes a stored tensor or an input"),
        (first_input({"as_custom_obj": {"name": "x", "class_fqn": "os"}}), "as_custom_obj"),
        (first_input({"as_graph": {"name": "x", "graph": {}}}), "as_graph"),
        (first_input({"as_operator": "os.system"}), "as_operator"),
        (first_input({"as_tensor": {"name": "x"}, "as_int": 1}), "where one value belongs"),
        (first_input({"as_layout": 2}), "as_layout"),
        (spec("custom_obj", {"arg": {"name": "b_f"}, "custom_obj_name": "f"}), "custom_obj, which is never loaded"),
        (spec("buffer", {"arg": {"name": "b_f"}, "buffer_name": "g", "persistent": True}), "lacks the tensor 'g'"),
        (spec("buffer_mutation", {"arg": {"name": "mul"}, "buffer_name": "f"}, "output_specs"), "call eval"),
        (lambda program: program.update(schema_version={"major": 9, "minor": 0}), "version 9 of the schema"),
        (lambda program: program.pop("graph_module"), "not that of torch.export"),
    ],
)
def test_graphs_that_are_refused(folder: Path, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(HostileFile, match=message):
        load(write(folder / "changed.pt2", changed(change)))


def test_expressions_are_never_evaluated(folder: Path) -> None:
    program = scale_program("__import__('os').system('touch evaluated')")
    assert load(write(folder / "evil.pt2", program)).inputs[0].shape == (-1, 4)


def meta_with(**fields: Any) -> dict[str, Any]:
    return {**meta((4,)), **fields}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"use_pickle": True}, "stored as a pickle"),
        ({"tensor_meta": None}, "stored as a pickle"),
        ({"path_name": "../../secret"}, "has no data/weights"),
        ({"tensor_meta": meta((5,))}, "5 elements, but its file has 4"),
        ({"tensor_meta": meta((2**62, 2**62))}, "elements, but its file has 4"),
        ({"tensor_meta": meta_with(storage_offset={"as_int": 3})}, "7 elements"),
        ({"tensor_meta": meta_with(strides=[{"as_int": -1}])}, "has the size -1"),
        ({"tensor_meta": meta_with(layout=0)}, "layout"),
        ({"tensor_meta": meta_with(dtype=9)}, "tensors of type 9"),
    ],
)
def test_stored_tensors_that_are_refused(folder: Path, payload: dict[str, Any], message: str) -> None:
    with pytest.raises(HostileFile, match=message):
        load(write(folder / "payload.pt2", scale_program(), **payload))


def test_archives_that_are_refused(folder: Path) -> None:
    path = folder / "other.pt2"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"more": {"data.pkl": pickle.dumps(1), "code/model.py": b""}}, "is TorchScript, .* torch.export.save"),
        ({"more": {"data.pkl": pickle.dumps(1)}}, "is a state dict, .* torch.export.save"),
        ({"more": {"data/aotinductor/model/a.so": b""}}, "compiled code of AOTInductor"),
        ({"more": {"models/other.json": b"{}"}}, "has 2 exported programs"),
        ({"compression": zipfile.ZIP_DEFLATED}, "compressed files"),
    ]
    for options, message in cases:
        with pytest.raises(HostileFile, match=message):
            load(write(path, scale_program(), **options))
    path.write_bytes(b"no archive")
    with pytest.raises(HostileFile, match="is no archive"):
        load(path)
    with pytest.raises(HostileFile, match="its JSON is not"):
        load(write(path, b"[" * 100_000))
    script = folder / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Identity()), script)
    with pytest.raises(HostileFile, match="is TorchScript"):
        load(script)


@given(st.data())
def test_mutated_archives(folder: Path, data: st.DataObject) -> None:
    text = json.dumps(scale_program()).encode()
    at, gone = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 9))
    made = data.draw(st.sampled_from([b"", b"as_int", b'"', b"{", b"]", b"-1", b"99999999999", b"null", b"aten.add"]))
    path = write(folder / "mutated.pt2", text[:at] + made + text[at + gone :])
    if data.draw(st.booleans()):
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
    try:
        load(path)
    except (HostileFile, ValueError, RuntimeError):
        pass  # the child process reports these as the model's error


def test_only_values_that_are_needed_are_kept(folder: Path) -> None:
    program = scale_program()
    graph = program["graph_module"]["graph"]
    graph["nodes"] = [
        node("mul.Tensor", tensor("x"), tensor("b_f"), outputs=(tensor("one"),)),
        node("add.Tensor", tensor("one"), tensor("one"), outputs=(tensor("two"),)),
        node("add.Tensor", tensor("two"), tensor("x"), outputs=(tensor("mul"),)),
    ]
    model = load(write(folder / "chain.pt2", program))
    assert [call.last_uses for call in model._calls] == [[], ["one"], ["two"]]
    assert model.run({"x": np.ones((1, 4), np.float32)})[0].tolist() == [[5, 5, 5, 5]]
