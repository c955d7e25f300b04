"""Runs Triton's own tests, unmodified, with Penstock in Triton's place.

    git clone https://github.com/triton-inference-server/server CHECKOUT
    python -m venv ENV && ENV/bin/pip install 'tritonclient[all]' onnx requests
    python scripts/triton_l0.py CHECKOUT ENV/bin/python --only L0_batcher

The models are made by Triton's own scripts, of which only ONNX's are run. Each test gets a server of its own, with the
settings that the folder's test.sh gives it. Ports 8000 and 8001 must be free. The result is a table: tests that passed,
failed (with the last line of the error), and those that do not apply, with the reason.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

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


CASES = [
    *batcher(),
    Case("L0_http", "http_test.HttpTest", identities, {"BACKENDS": "onnx"}),
    Case("L0_infer", "infer_test.InferTest", every_model, {"BACKENDS": "onnx", "ENSEMBLES": "0", "CPU_ONLY": "1"}),
]
# Tests that need what ONNX models on a CPU do not have, by a part of their name.
NOT_APPLICABLE = {
    "allow_ragged": "ragged batches need a backend of Triton's",
    "max_queue_delay_only": "a custom backend of Triton's",
    "preserve_ordering": "a custom backend of Triton's and its trace file",
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


def run(workshop: Workshop, case: Case) -> dict[str, str]:
    """Runs a case. Returns "passed", or why not, by test."""
    models = workshop.work / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir(parents=True)
    case.models(workshop, models)
    folder = workshop.qa / case.suite
    search = os.pathsep.join([str(workshop.qa / "common"), str(folder)])
    environment = {**os.environ, **case.environment, "PYTHONPATH": search, "TRITONSERVER_IPADDR": "localhost"}
    with server(models, case, workshop.work / "server.log"):
        made = subprocess.run(
            [str(workshop.python), "-m", "unittest", "-v", case.test],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip
    (workshop.work / f"{case.test}.log").write_text(made.stdout)
    found = {}
    for test, outcome in re.findall(
        r"^(test_\w+) .*?\.\.\. (?:.*\n)*?(ok|FAIL|ERROR|skipped.*)$", made.stdout, re.MULTILINE
    ):
        if outcome == "ok":
            found[test] = "passed"
        elif outcome.startswith("skipped"):
            found[test] = f"not applicable: {outcome}"
        else:
            why = re.search(rf"^(?:FAIL|ERROR): {test}.*?\n\n", made.stdout, re.MULTILINE | re.DOTALL)
            lines = why[0].strip().splitlines() if why else [outcome]
            found[test] = f"failed: {lines[-1][:200]}"
    return found or {case.test: f"failed: {made.stdout.strip().splitlines()[-1][:200]}"}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("checkout", type=Path, help="of Triton's repository server")
    options.add_argument("python", type=Path, help="an interpreter with tritonclient[all], onnx and requests")
    options.add_argument("--only", default="", help="run only cases whose name contains this")
    options.add_argument("--work", type=Path, default=Path("/tmp/triton_l0"), help="folder for models and logs")
    given = options.parse_args()
    workshop = Workshop(given.checkout.absolute(), given.python.absolute(), given.work.absolute())
    counts: dict[str, int] = {}
    for case in CASES:
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
