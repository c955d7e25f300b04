"""The import table of docs/architecture.md, enforced: a package imports only those in its row, in no circle."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
LAYER0 = {"declared", "messages", "config", "observe"}
ALLOWED = {
    "declared": set(),
    "messages": {"declared"},
    "config": {"declared", "messages"},
    "observe": {"messages"},
    "gguf": set(),
    "families": LAYER0 | {"gguf"},
    "schedule": LAYER0,
    "text": LAYER0 | {"gguf"},
    "kernels": LAYER0,
    "weights": LAYER0 | {"gguf", "families", "kernels"},
    "models": LAYER0 | {"gguf", "families", "weights", "kernels"},
    "runtime": LAYER0 | {"gguf", "families", "kernels", "weights", "models"},
    "engine": LAYER0 | {"gguf", "schedule", "text", "families"},
    # Rooms without code yet: the first file in one finds its row here.
    "quantize": LAYER0 | {"gguf", "families", "kernels", "weights", "models"},
    "repository": LAYER0 | {"schedule", "engine"},
    "cluster": LAYER0,  # engines elsewhere are reached by `engine/link`: a fleet holds their EngineClients
    "simulate": LAYER0 | {"gguf", "families", "schedule", "engine", "repository", "cluster"},
    "frontend": LAYER0 | {"text"},
    "prepare": LAYER0 | {"gguf", "families", "kernels", "weights", "text", "engine", "frontend"},
    "api": LAYER0 | {"text", "weights", "engine", "frontend", "prepare"},
    "bench": None,  # composition roots import what they need
    "cli": None,
}
# The places where the engine meets what executes its plans, imported when a worker starts.
EXCEPTIONS = {("engine/executor.py", "runtime"), ("engine/ranks/worker.py", "runtime")}
TORCH_FREE = LAYER0 | {"gguf", "families", "schedule", "text", "engine", "cluster", "simulate", "frontend"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "torch.load"}
IMPORTING_CALLS = {"import_module", "__import__"}
# The scheduler and the state of streams are pure: no clock, no event loop, no threads, no environment. The simulator
# has a clock of its own.
CLOCKS_AND_WAITING = {"asyncio", "time", "datetime", "threading", "os", "random", "socket", "subprocess"}
BANNED_IN_PACKAGE = {
    "messages": CLOCKS_AND_WAITING,
    "schedule": CLOCKS_AND_WAITING,
    "simulate": {"asyncio", "time", "datetime", "threading"},
}

# Names of several classes that mean the same: each API has its own message, and Python users have sampling parameters.
SHARED_NAMES = {
    "CalledFunction",
    "ChatFields",
    "ContentPart",
    "GenerateCodec",
    "GenerateFields",
    "Message",
    "Parameters",
    "PromptFields",
    "SamplingParams",
}
# A struct of C++ may have the name of a Python class here: both describe the same memory, or mean the same.
CPP_MIRRORS = ("kernels/native/", "kernels/triton/sampling/")

FILES = sorted(SOURCE.rglob("*.py"))
PACKAGE_FILES = [path for path in FILES if path.parent != SOURCE]


def name_of(path: Path) -> str:
    """The module in a file."""
    parts = ("penstock", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(tree: ast.AST, *, for_types: bool = True) -> Iterator[ast.AST]:
    """Every node; without `for_types`, not those in the body of an `if TYPE_CHECKING`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def called(call: ast.Call) -> str:
    """What a call calls, with what it is an attribute of: `torch.load`."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return f"{function.value.id}.{function.attr}" if isinstance(function.value, ast.Name) else f".{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def imported(tree: ast.AST, where: str = "", *, for_types: bool = True) -> set[str]:
    """The names that are imported anywhere in a file, by statements and by calls such as import_module("name")."""
    names = set()
    for node in nodes(tree, for_types=for_types):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                pytest.fail(f"{where}:{node.lineno} is a relative import: write the whole name")
            names.update(f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).rpartition(".")[2] in IMPORTING_CALLS:
            name = node.args[0] if node.args else None
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str)) or name.value.startswith("."):
                pytest.fail(f"{where}:{node.lineno} imports by a computed or relative name: write the whole name")
            names.add(name.value)
    return names


def module_graph() -> dict[str, set[str]]:
    """The modules that each module of ours imports, at its top or within a function, but not for its types alone."""
    graph = {}
    for name, path in MODULES.items():
        targets = set()
        for full in imported(tree_of(path), for_types=False):
            target = full if full in MODULES else full.rpartition(".")[0]
            if target in MODULES:
                targets.add(target)
        graph[name] = targets - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(component) > 1:
                        found.append(sorted(component))
    return found


def _broken_rules(path: Path) -> Iterator[str]:
    """What a file of a package imports against the table."""
    relative = path.relative_to(SOURCE)
    package = relative.parts[0]
    allowed = ALLOWED[package]
    for name in imported(tree_of(path), str(relative)):
        parts = name.split(".")
        if parts[0] == "penstock" and len(parts) > 1 and allowed is not None and (SOURCE / parts[1]).is_dir():
            if parts[1] != package and parts[1] not in allowed and (str(relative), parts[1]) not in EXCEPTIONS:
                yield f"{relative} imports penstock.{parts[1]}"
        elif parts[0] == "torch" and package in TORCH_FREE:
            yield f"{relative} imports torch"
        elif parts[0] in BANNED_MODULES | BANNED_IN_PACKAGE.get(package, set()):
            yield f"{package} must not import {name}: {relative}"


def test_packages_import_only_those_in_their_row() -> None:
    packages = {path.relative_to(SOURCE).parts[0] for path in PACKAGE_FILES}
    assert packages <= set(ALLOWED), "a package is not in the import table: add it there and to docs/architecture.md"
    assert [rule for path in PACKAGE_FILES for rule in _broken_rules(path)] == []


def test_no_code_is_run_from_data() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno} calls {called(node)}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and called(node) in BANNED_CALLS
    ]
    assert calls == []


def test_files_and_folders_are_small() -> None:
    """At most 400 lines in a file, and 20 files side by side."""
    files = [path for kind in ("py", "cpp", "h", "js", "css") for path in SOURCE.rglob(f"*.{kind}")]
    own = [path for path in files if not path.name.endswith(".min.js") and "vendor" not in path.parts]
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in own}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    folders = Counter(str(path.parent.relative_to(SOURCE)) for path in own)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_the_name_of_a_class_has_one_meaning() -> None:
    bodies = (tree_of(path).body for path in FILES)
    names = Counter(node.name.lstrip("_") for body in bodies for node in body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == SHARED_NAMES


def test_a_struct_of_cpp_has_no_name_of_an_unrelated_class() -> None:
    structs = set()
    for path in (SOURCE / "kernels/native/cpp").rglob("*.[ch]*"):
        structs.update(re.findall(r"^(?:struct|class) (\w+) \{", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"LinearOp", "ThreadTeam"} <= structs
    for path in FILES:
        if not str(path.relative_to(SOURCE)).startswith(CPP_MIRRORS):
            classes = {node.name.lstrip("_") for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
            assert not classes & structs, f"{path.relative_to(SOURCE)}: C++ has a struct of that name"


def test_only_kernels_of_triton_lack_annotations() -> None:
    """mypy cannot exempt functions by their decorator, so its check is off in these modules, and this test is there."""
    checked = 0
    for path in (SOURCE / "kernels/triton").rglob("*.py"):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            if any(ast.unparse(each).startswith("triton.jit") for each in function.decorator_list):
                continue
            given, where = function.args, f"{path.name}:{function.lineno}: {function.name}"
            arguments = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            assert function.returns is not None, f"{where} lacks the type of its result"
            for argument in arguments:
                typed = argument is None or argument.annotation is not None or argument.arg in ("self", "cls")
                assert typed, f"{where}: {argument.arg} lacks a type"
            checked += 1
    assert checked > 50


def test_no_import_is_circular() -> None:
    assert not cycles(module_graph())


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}
    assert cycles(graph) == [["b", "c"], ["e", "f"]]


def test_imports_by_a_call_count() -> None:
    source = "from importlib import import_module\ndef f(): import_module('penstock.cli.main'); __import__('time')"
    assert imported(ast.parse(source)) == {"importlib.import_module", "penstock.cli.main", "time"}
    with pytest.raises(pytest.fail.Exception, match="computed"):
        imported(ast.parse("import importlib; importlib.import_module(name)"))


def test_imports_for_types_make_no_circle() -> None:
    source = "if TYPE_CHECKING:\n    import penstock.cli\nelse:\n    import time\ndef f():\n    import os"
    assert imported(ast.parse(source), for_types=False) == {"time", "os"}
