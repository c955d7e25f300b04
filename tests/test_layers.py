"""The import table of docs/architecture.md, enforced: a room imports only rooms below it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
LAYER0 = {"messages", "config", "observe"}
ALLOWED = {
    "messages": set(),
    "config": {"messages"},
    "observe": {"messages"},
    "families": LAYER0,
    "schedule": LAYER0,
    "text": LAYER0,
    "kernels": LAYER0,
    "weights": LAYER0 | {"families", "kernels"},
    "models": LAYER0 | {"families", "weights", "kernels"},
    "runtime": LAYER0 | {"families", "kernels", "weights", "models"},
    "engine": LAYER0 | {"schedule", "text", "families"},
    "frontend": LAYER0 | {"text"},
    "bench": None,  # composition roots import what they need
    "cli": None,
}
# The places where the engine meets what executes its plans, imported when a worker starts.
EXCEPTIONS = {("engine/executor.py", "runtime"), ("engine/ranks/worker.py", "runtime")}
TORCH_FREE = {"messages", "config", "observe", "families", "schedule", "text", "engine", "frontend"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "torch.load"}

FILES = sorted(SOURCE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                pytest.fail(f"relative import at line {node.lineno}: write the whole name")
            module = node.module or ""
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_only_rooms_below(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    room = relative.parts[0]
    if len(relative.parts) == 1:
        return  # penstock/__init__.py
    assert room in ALLOWED, f"{room} is not in the import table: add it there and to docs/architecture.md"
    tree = ast.parse(path.read_text())
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] == "penstock" and len(parts) > 1 and ALLOWED[room] is not None:
            target = parts[1]
            ok = target == room or target in ALLOWED[room] or (str(relative), target) in EXCEPTIONS
            assert ok or not (SOURCE / target).is_dir(), f"{relative} imports penstock.{target}"
        if parts[0] == "torch":
            assert room not in TORCH_FREE, f"{relative} imports torch"
        assert parts[0] not in BANNED_MODULES, f"{relative} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_code_is_run_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS, (
                f"{path.name}:{node.lineno} calls {ast.unparse(node.func)}"
            )
