"""Runs Triton's own tests, and the examples of its clients, unmodified, with Penstock in Triton's place.

    git clone https://github.com/triton-inference-server/server CHECKOUT
    git clone https://github.com/triton-inference-server/client
    python -m venv ENV && ENV/bin/pip install 'tritonclient[all]' onnx requests
    python scripts/triton_l0.py CHECKOUT ENV/bin/python --only L0_batcher
    python scripts/triton_l0.py CHECKOUT ENV/bin/python --examples client/src/python/examples

The models are made by Triton's own scripts, of which only ONNX's are run. Each test gets a server of its own, with the
settings that the folder's test.sh gives it. Ports 8000 and 8001 must be free. The result is a table: tests that passed,
failed (with the last line of the error), and those that do not apply, with the reason.
"""

import argparse
import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.repository.onnx_files import FLOAT, INT64, model, node, put

# Runs the tests that its first argument names, and writes their outcomes as JSON to the file of the second one.
RUNNER = """
import json, sys, unittest
tests, found = [unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])], {}
while tests:
    test = tests.pop()
    if isinstance(test, unittest.TestSuite):
        tests += test
        continue
    result = unittest.TextTestRunner(sys.stdout).run(test)
    errors = [text.strip().splitlines()[-1] for _, text in (*result.failures, *result.errors)]
    skipped = [why for _, why in result.skipped]
    found[test.id()] = ("failed: " + errors[0] if errors else "not applicable: " + skipped[0] if skipped else "passed")
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""
ADD_SUB = "onnx_float32_float32_float32"
DELAYED = "dynamic_batching { preferred_batch_size: [ 2, 6 ], max_queue_delay_microseconds: 10000000 }\n"
PREFERRED = "dynamic_batching { preferred_batch_size: [ 4, 6 ] }\n"


class Case(NamedTuple):
    """A test, or all tests of a class, and the server that it needs."""

    suite: str  # the folder below qa
    test: str  # MODULE.CLASS.TEST, or MODULE.CLASS
    models: Callable[["Workshop", Path], None]  # fills the repository
    environment: Mapping[str, str] = MappingProxyType({})  # of the server and the test
    flags: tuple[str, ...] = ()  # of the server
    place: str = "models"  # of the repository, within the copy of the suite that tests run in


class Workshop:
    """The checkout, the interpreter of the tests, and the models that Triton's scripts have made."""

    def __init__(self, checkout: Path, python: Path, work: Path) -> None:
        self.qa, self.python, self.work = checkout / "qa", python, work

    def made(self, name: str) -> Path:
        """A folder of models, which is made when it is first needed."""
        script, *flags = {
            "qa_model_repository": ("gen_qa_models.py", "--onnx"),
            "qa_variable_model_repository": ("gen_qa_models.py", "--onnx", "--variable"),
            "qa_identity_model_repository": ("gen_qa_identity_models.py", "--onnx"),
            "qa_ensemble_model_repository": ("gen_qa_models.py", "--ensemble"),
        }[name]
        folder = self.work / name
        if not folder.exists():
            folder.mkdir(parents=True)
            found = next(self.qa.rglob(script))
            search = os.pathsep.join([str(self.qa / "common"), str(found.parent)])
            command = [str(self.python), str(found), *flags, f"--models_dir={folder}"]
            subprocess.run(command, cwd=found.parent, check=True, env={**os.environ, "PYTHONPATH": search})
        return folder

    def copy(
        self, kind: str, name: str, target: Path, *, rows: int | None = None, more: str = "", any_size: bool = False
    ) -> None:
        """Copies a model, as test.sh does: with another batch size, version 1 alone, more settings, or any sizes."""
        shutil.copytree(self.made(kind) / name, target / name)
        config = target / name / "config.pbtxt"
        text = config.read_text()
        if rows is not None:
            text = re.sub(r"^max_batch_size:.*$", f"max_batch_size: {rows}", text, flags=re.MULTILINE)
            text = re.sub(
                r"^version_policy:.*$", "version_policy: { specific { versions: [1] }}", text, flags=re.MULTILINE
            )
        text += "\n" + more
        config.write_text(text.replace("16", "-1") if any_size else text)


def fixed(workshop: Workshop, target: Path) -> None:
    workshop.copy("qa_model_repository", ADD_SUB, target, rows=8, more=DELAYED)


def variable(workshop: Workshop, target: Path) -> None:
    workshop.copy("qa_variable_model_repository", ADD_SUB, target, rows=8)
    config = target / ADD_SUB / "config.pbtxt"
    config.write_text(config.read_text().replace("16", "-1") + DELAYED)


def preferred(workshop: Workshop, target: Path) -> None:
    workshop.copy("qa_model_repository", ADD_SUB, target, rows=8, more=PREFERRED)


def every_model(workshop: Workshop, target: Path) -> None:
    for kind in ("qa_model_repository", "qa_variable_model_repository"):
        for folder in sorted(workshop.made(kind).iterdir()):
            if not (target / folder.name).exists():
                shutil.copytree(folder, target / folder.name)


def identities(workshop: Workshop, target: Path) -> None:
    for folder in sorted(workshop.made("qa_identity_model_repository").iterdir()):
        shutil.copytree(folder, target / folder.name)
    queue = target / "onnx_zero_1_float32_queue"
    shutil.copytree(target / "onnx_zero_1_float32", queue)
    text = (queue / "config.pbtxt").read_text().replace("onnx_zero_1_float32", queue.name)
    rules = (
        "max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 4 ] default_queue_policy { max_queue_size: 1 }"
    )
    (queue / "config.pbtxt").write_text(f"{text}\ndynamic_batching {{ {rules} }}\n")
    one = target / "onnx_zero_1_object_1_element"
    shutil.copytree(target / "onnx_zero_1_object", one)
    config = one / "config.pbtxt"
    config.write_text(
        re.sub(r"dims: \[ -1 \]", "dims: [ 1 ]", config.read_text()).replace("onnx_zero_1_object", one.name)
    )
    renamed(workshop, target, "qa_identity_model_repository", "onnx_zero_1_object", "simple_identity")
    whole = [("INPUT0", INT64, ("n", "m"))]
    put(
        target,
        "simple_identity_int64",
        model([node("Identity", ["INPUT0"], ["OUTPUT0"])], whole, [("OUTPUT0", INT64, ("n", "m"))]),
    )


def added(workshop: Workshop, target: Path) -> None:
    """The model `simple` of Triton's examples."""
    renamed(workshop, target, "qa_model_repository", "onnx_int32_int32_int32", "simple", dims="16")


def batcher() -> list[Case]:
    """The cases of L0_batcher, as its test.sh runs them."""
    plain = (
        *("static_batch_preferred", "static_batch_lt_any_preferred", "static_batch_not_preferred"),
        *("static_batch_gt_max_preferred", "multi_batch_not_preferred", "multi_batch_gt_max_preferred"),
        *("multi_batch_sum_gt_max_preferred", "multi_same_output0", "multi_same_output1"),
        *("multi_different_outputs", "multi_different_output_order"),
    )
    delayed = {
        "multi_batch_delayed_sum_gt_max_preferred": 2,
        "multi_batch_use_biggest_preferred": 6,
        "multi_batch_use_best_preferred": 3,
        "multi_batch_delayed_use_max_batch": 3,
    }
    shapes = ("multi_batch_not_preferred_different_shape", "multi_batch_preferred_different_shape")
    shapes += ("multi_batch_different_shape",)
    aligned = {"aligned": 4, "unaligned": 5, "use_biggest_preferred": 7, "use_no_preferred_size": 3}
    cases = []

    def case(name: str, models: Callable[[Workshop, Path], None], delay: int = 0, kind: str = "FIXED") -> None:
        environment = {"BATCHER_TYPE": kind, "BACKENDS": "onnx"}
        if delay:
            environment["TRITONSERVER_DELAY_SCHEDULER"] = str(delay)
        cases.append(Case("L0_batcher", f"batcher_test.BatcherTest.test_{name}", models, environment))

    for kind, models in (("FIXED", fixed), ("VARIABLE", variable)):
        for name in plain:
            case(name, models, kind=kind)
        for name, delay in delayed.items():
            case(name, models, delay, kind)
    for name in shapes:
        case(name, variable, kind="VARIABLE")
    case("multi_batch_delayed_preferred_different_shape", variable, 4, "VARIABLE")
    for name, delay in aligned.items():
        case(f"preferred_batch_only_{name}", preferred, delay)
    return cases


EXPLICIT = ("--load-model", "none")
SIMPLE = f"simple_{ADD_SUB}"
IDENTITY = "onnx_zero_1_float32"


def renamed(
    workshop: Workshop, target: Path, kind: str, name: str, new: str, *, dims: str = "-1", more: str = ""
) -> None:
    """Copies version 1 of an ONNX model under the name of a model that Triton's own backends have."""
    shutil.copytree(workshop.made(kind) / name, target / new, ignore=shutil.ignore_patterns("2", "3"))
    config = target / new / "config.pbtxt"
    text = re.sub(r"dims: \[[^]]*\]", f"dims: [ {dims} ]", config.read_text().replace(f'"{name}"', f'"{new}"'))
    text = re.sub(r"^version_policy:.*$", "", text, flags=re.MULTILINE)
    config.write_text(f"{text}\n{more}")


def simple_ensemble(workshop: Workshop, target: Path) -> None:
    """The models of the suite; both versions of `simple` have the same file."""
    suite = workshop.qa / "L0_simple_ensemble/models"
    file = workshop.made("qa_model_repository") / "onnx_int32_int32_int32/1/model.onnx"
    for name in ("simple", "ensemble_add_sub_int32_int32_int32"):
        shutil.copytree(suite / name, target / name, dirs_exist_ok=True)
    for version in ("1", "2"):
        (target / "simple" / version).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target / "simple" / version / "model.onnx")


def ensemble_and_member(workshop: Workshop, target: Path) -> None:
    shutil.copytree(workshop.made("qa_ensemble_model_repository") / SIMPLE, target / SIMPLE)
    shutil.copytree(workshop.made("qa_model_repository") / ADD_SUB, target / ADD_SUB)


def one_row(workshop: Workshop, target: Path) -> None:
    ensemble_and_member(workshop, target)
    for name in (SIMPLE, ADD_SUB):
        config = target / name / "config.pbtxt"
        config.write_text(re.sub("max_batch_size:.*", "max_batch_size: 1", config.read_text()))


def without_files(workshop: Workshop, target: Path, versions: str = "123") -> None:
    shutil.copytree(workshop.made("qa_model_repository") / ADD_SUB, target / ADD_SUB)
    for version in versions:
        for path in (target / ADD_SUB / version).iterdir():
            path.unlink()


def without_version_1(workshop: Workshop, target: Path) -> None:
    shutil.copytree(workshop.made("qa_model_repository") / ADD_SUB, target / ADD_SUB)
    shutil.rmtree(target / ADD_SUB / "1")


def loaded_together(workshop: Workshop, target: Path) -> None:
    renamed(workshop, target, "qa_identity_model_repository", IDENTITY, "identity_zero_1_int32")
    queued(workshop, target, "")


def queued(workshop: Workshop, target: Path, rules: str, preferred: str = "4, 8") -> None:
    """The models of L0_model_queue, with an ONNX model in the place of Triton's custom one."""
    more = f"dynamic_batching {{ preferred_batch_size: [ {preferred} ] {rules} }}" if rules else ""
    renamed(workshop, target, "qa_identity_model_repository", IDENTITY, "custom_zero_1_float32", more=more)
    config = target / "custom_zero_1_float32/config.pbtxt"
    config.write_text(re.sub("max_batch_size:.*", "max_batch_size: 32", config.read_text()))
    shutil.copytree(workshop.qa / "L0_model_queue/ensemble_zero_1_float32", target / "ensemble_zero_1_float32")


def of_examples(workshop: Workshop, target: Path) -> None:
    """The models that the clients' examples need, and others: an example counts seven."""
    for name, new in (
        ("onnx_int32_int32_int32", "simple"),
        ("onnx_int8_int8_int8", "simple_int8"),
        *(("onnx_int32_int32_int32", f"other_{number}") for number in range(3)),
    ):
        renamed(workshop, target, "qa_model_repository", name, new, dims="16")
    renamed(workshop, target, "qa_variable_model_repository", "onnx_object_object_object", "simple_string", dims="16")
    renamed(workshop, target, "qa_identity_model_repository", "onnx_zero_1_object", "simple_identity")


def with_queue(rules: str, preferred: str = "4, 8") -> Callable[[Workshop, Path], None]:
    delay = "max_queue_delay_microseconds: 10000000"
    return lambda workshop, target: queued(workshop, target, f"{delay} {rules}", preferred)


def validated(workshop: Workshop, target: Path) -> None:
    """Models with the inputs of those of the suite, which need Triton's Python backend."""
    for path in (workshop.qa / "L0_input_validation/models").iterdir():
        if path.name != "input_all_optional":
            text = (path / "config.pbtxt").read_text()
            inputs = [(name, FLOAT, ("n",)) for name in re.findall(r'"(INPUT\d)"', text)]
            made = model([node("Identity", [inputs[0][0]], ["OUTPUT0"])], inputs, [("OUTPUT0", FLOAT, ("n",))])
            put(target, path.name, made)
            (target / path.name / "config.pbtxt").write_text(text.replace('"python"', '"onnxruntime"'))


def shaped(workshop: Workshop, target: Path) -> None:
    """The identity that the suite makes with TorchScript, as an archive of torch.export."""
    import torch

    name = "onnx_object_int32_int32"
    shutil.copytree(workshop.made("qa_model_repository") / name, target / name)
    (target / "pt_identity/1").mkdir(parents=True)
    made = torch.export.export(
        torch.nn.Identity(), (torch.zeros(2, 8),), dynamic_shapes={"input": {0: torch.export.Dim("n")}}
    )
    torch.export.save(made, target / "pt_identity/1/model.pt2")
    tensor = "data_type: TYPE_FP32 dims: [8]"
    (target / "pt_identity/config.pbtxt").write_text(
        'backend: "pytorch" max_batch_size: 8 '
        f'input [{{ name: "INPUT0" {tensor} }}] output [{{ name: "OUTPUT0" {tensor} }}] '
        "dynamic_batching { max_queue_delay_microseconds: 1000000 }"
    )


def nothing(workshop: Workshop, target: Path) -> None:
    pass


def classified(workshop: Workshop, target: Path) -> None:
    for name, new in ((IDENTITY, "identity_fp32"), ("onnx_zero_1_object", "identity_bytes")):
        renamed(workshop, target, "qa_identity_model_repository", name, new)


def lifecycle() -> list[Case]:
    """The cases of L0_lifecycle with explicit control whose models are ONNX, or can be."""
    models: dict[str, tuple[Callable[[Workshop, Path], None], tuple[str, ...]]] = {
        "model_control": (one_row, EXPLICIT),
        "model_control_fail": (without_files, EXPLICIT),
        "model_control_ensemble": (one_row, EXPLICIT),
        "config_override": (lambda workshop, target: without_files(workshop, target, "13"), EXPLICIT),
        "file_override": (without_version_1, ("--load-model", ADD_SUB)),
        "file_override_security": (without_version_1, ("--load-model", ADD_SUB)),
        "concurrent_model_load_unload": (loaded_together, EXPLICIT),
    }
    return [
        Case("L0_lifecycle", f"lifecycle_test.LifeCycleTest.test_{name}", fill, {}, flags)
        for name, (fill, flags) in models.items()
    ]


def model_queue() -> list[Case]:
    rules = {
        "policy_delay": "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 }",
        "policy_reject": "default_queue_policy { default_timeout_microseconds: 100000 }",
        "timeout_override": (
            "default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 1000000 }"
        ),
        "priority_levels": "priority_levels: 2 default_priority_level: 2",
        "max_priority_levels": f"priority_levels: {2**64 - 1} default_priority_level: {2**32}",
    }
    policy = "allow_timeout_override: true default_timeout_microseconds: 11000000"
    both = (
        f"priority_levels: 2 default_priority_level: 2 default_queue_policy {{ timeout_action: DELAY {policy} }} "
        f"priority_queue_policy {{ key: 2 value: {{ timeout_action: REJECT {policy} }} }}"
    )
    models = {name: with_queue(text) for name, text in rules.items()}
    models["priority_with_policy"] = with_queue(both, "4, 8, 32")
    return [
        Case("L0_model_queue", f"model_queue_test.ModelQueueTest.test_{name}", fill) for name, fill in models.items()
    ]


CASES = [
    *batcher(),
    Case("L0_http", "http_test.HttpTest", identities, {"BACKENDS": "onnx"}),
    Case("L0_http", "python_http_aio_test.TestHttpAioClient", added, {}, ("--client-shared-memory", "1MiB")),
    Case("L0_http", "http_request_many_chunks.HTTPRequestManyChunksTest", added),
    Case("L0_infer", "infer_test.InferTest", every_model, {"BACKENDS": "onnx", "ENSEMBLES": "0", "CPU_ONLY": "1"}),
    Case("L0_simple_ensemble", "ensemble_test.EnsembleTest.test_ensemble_add_sub", simple_ensemble),
    Case("L0_simple_ensemble", "ensemble_test.EnsembleTest.test_ensemble_add_sub_one_output", simple_ensemble),
    *(
        Case(
            "L0_response_cache",
            f"ensemble_cache_test.EnsembleCacheTest.test_ensemble_{name}",
            ensemble_and_member,
            {},
            EXPLICIT,
            "models/ensemble_models",
        )
        for name in ("top_level_response_cache", "all_models_cache_enabled", "composing_model_cache_enabled")
    ),
    *lifecycle(),
    *model_queue(),
    Case("L0_input_validation", "input_validation_test.InputValTest", validated),
    Case("L0_input_validation", "input_validation_test.InputShapeTest", shaped),
    Case("L0_input_validation", "input_validation_test.ModelNameValidationTest", nothing, {}, EXPLICIT),
    *(
        Case("L0_parameters", "class_count_test.ClassificationParameterTest", classified, {"CLIENT_TYPE": kind})
        for kind in ("http", "grpc")
    ),
]
# Tests that need what ONNX models on a CPU do not have, by a part of their name.
NOT_APPLICABLE = {
    "test_load_model": "a server that follows its folder",
    "test_unload_model": "a server that follows its folder",
    "get_model_repository_index": "a folder of seven models, most of them of other backends",
    "allow_ragged": "ragged batches need a backend of Triton's",
    "max_queue_delay_only": "a custom backend of Triton's",
    "preserve_ordering": "a custom backend of Triton's and its trace file",
    "input_validation_all_optional": "Triton's Python backend",
    "wrong_input_shape_tensor_size": "TensorRT",
}
EXAMPLES_NOT_APPLICABLE = {
    "cudashm": "memory of a GPU",
    "sequence": "models with state",
    "custom_repeat": "a custom backend of Triton's",
    "memory_growth": "a custom backend of Triton's",
    "image": "models of images",
    "grpc_client": "only a model of Triton's test data",
    "vllm": "a language model",
}


@contextlib.contextmanager
def server(models: Path, case: Case, log: Path) -> Iterator[None]:
    """Penstock on Triton's ports."""
    command = [sys.executable, "-m", "penstock", "serve", "--repository", str(models), "--port", "8000"]
    command += ["--grpc-port", "8001", "--state-dir", "none", "--max-body-size", "64MiB", *case.flags]
    environment = {
        **os.environ,
        **{name: value for name, value in case.environment.items() if name.startswith("TRITON")},
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end and process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen("http://127.0.0.1:8000/readyz", timeout=2):
                    break
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextlib.contextmanager
def metrics() -> Iterator[None]:
    """Triton has a port for metrics, 8002: it shows Penstock's."""

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with urllib.request.urlopen("http://127.0.0.1:8000/metrics") as answer:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer.read())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 8002), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def run(workshop: Workshop, case: Case) -> dict[str, str]:
    """Runs a case. Returns "passed", or why not, by test."""
    folder = workshop.work / "suite"  # a copy: tests change files
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(workshop.qa / case.suite, folder, ignore=shutil.ignore_patterns("models"))
    models = folder / case.place
    models.mkdir(parents=True)
    case.models(workshop, models)
    search = os.pathsep.join([str(workshop.qa / "common"), str(folder)])
    environment = {**os.environ, **case.environment, "PYTHONPATH": search, "TRITONSERVER_IPADDR": "localhost"}
    outcomes = folder / "outcomes.json"
    with server(models, case, workshop.work / "server.log"), metrics():
        made = subprocess.run(
            [str(workshop.python), "-c", RUNNER, case.test, str(outcomes)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip
    (workshop.work / f"{case.test}.log").write_text(made.stdout)
    if not outcomes.exists():
        return {case.test: f"failed: {made.stdout.strip().splitlines()[-1][:200]}"}
    found: dict[str, str] = json.loads(outcomes.read_text())
    return {test.rpartition(".")[2]: outcome[:250] for test, outcome in sorted(found.items())}


def run_examples(workshop: Workshop, examples: Path) -> Iterator[tuple[str, str]]:
    """Runs each example, with a server of its own, as some unload models. Yields its name, and what became of it."""
    for script in sorted(examples.glob("*.py")):
        reason = next((why for part, why in EXAMPLES_NOT_APPLICABLE.items() if part in script.name), None)
        if reason is not None:
            yield script.name, f"not applicable: {reason}"
            continue
        models = workshop.work / "examples"
        shutil.rmtree(models, ignore_errors=True)
        models.mkdir(parents=True)
        of_examples(workshop, models)
        case = Case("examples", script.name, of_examples, {}, ("--client-shared-memory", "1MiB"))
        with server(models, case, workshop.work / "server.log"):
            made = subprocess.run(
                [str(workshop.python), str(script)], cwd=examples, capture_output=True, text=True, timeout=300
            )
        lines = (made.stdout + made.stderr).strip().splitlines() or [f"status {made.returncode}"]
        yield script.name, f"failed: {lines[-1][:200]}" if made.returncode else "passed"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("checkout", type=Path, help="of Triton's repository server")
    options.add_argument("python", type=Path, help="an interpreter with tritonclient[all], onnx and requests")
    options.add_argument("--only", default="", help="run only cases whose name contains this")
    options.add_argument("--examples", type=Path, help="run the clients' examples in this folder instead")
    options.add_argument("--work", type=Path, default=Path("/tmp/triton_l0"), help="folder for models and logs")
    given = options.parse_args()
    workshop = Workshop(given.checkout.absolute(), given.python.absolute(), given.work.absolute())
    counts: dict[str, int] = {}
    for name, outcome in run_examples(workshop, given.examples) if given.examples else ():
        counts[outcome.partition(":")[0]] = counts.get(outcome.partition(":")[0], 0) + 1
        print(f"{name:50} | {outcome}", flush=True)
    for case in () if given.examples else CASES:
        if given.only in f"{case.suite} {case.test}":
            kind = case.environment.get("BATCHER_TYPE", "")
            for test, outcome in run(workshop, case).items():
                reason = next((why for part, why in NOT_APPLICABLE.items() if part in test), None)
                if reason is not None and outcome != "passed":
                    outcome = f"not applicable: {reason}"
                counts[outcome.partition(":")[0]] = counts.get(outcome.partition(":")[0], 0) + 1
                print(f"{case.suite:14} {test} {kind} | {outcome}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
