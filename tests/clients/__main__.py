"""Commands for the clients of matrix.py.

python -m tests.clients install FOLDER [NAME...]    makes environments in FOLDER
python -m tests.clients run FOLDER [NAME...]        runs the clients and writes what passed into docs/tested-clients.md

Without a NAME, of all clients. A NAME is a package (openai), or a package and its version (openai-3.57.0).
"""

import datetime
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import penstock
from tests.clients.matrix import CLIENTS, SCHEMATHESIS, Client
from tests.clients.table import PAGE, Result, read, write

HERE = Path(__file__).parent


def chosen(names: list[str], clients: Sequence[Client] = CLIENTS) -> list[Client]:
    """The clients of these names. Raises SystemExit for an unknown name."""
    if unknown := set(names) - {name for client in clients for name in (client.package, client.name)}:
        raise SystemExit(f"no such client: {', '.join(sorted(unknown))}")
    return [client for client in clients if not names or {client.package, client.name} & set(names)]


def run(clients: list[Client], environments: Path) -> dict[Client, Result]:
    """Runs the tests of clients. Raises SystemExit if one has no environment."""
    if missing := [client.name for client in clients if not client.is_installed(environments)]:
        raise SystemExit(f"{environments} lacks {', '.join(missing)}; python -m tests.clients install makes them")
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        pytest = [sys.executable, "-m", "pytest", "-m", "", "-k", " or ".join(client.name for client in clients)]
        modules = dict.fromkeys(str(HERE / client.tests) for client in clients)
        subprocess.run(
            [*pytest, f"--junit-xml={report.name}", *modules],
            env=os.environ | {"TEST_CLIENTS": str(environments)},
        )
        cases = list(ElementTree.parse(report.name).iter("testcase"))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        client: Result(
            passed(client, cases),
            not client.generates or passed(client, cases, through="gateway"),
            runtime(client, environments),
            penstock.__version__,
            today,
        )
        for client in clients
    }


def passed(client: Client, cases: list[ElementTree.Element], through: str = "") -> bool:
    """Whether all tests of a client passed, and there were any: those of a server, or `through` a gateway."""
    module = f".{Path(client.tests).stem}"
    own = [
        case
        for case in cases
        if case.attrib["classname"].endswith(module)
        and client.name in case.attrib["name"]
        and ("gateway" in case.attrib["name"]) == (through == "gateway")
    ]
    return bool(own) and all(case.find(kind) is None for case in own for kind in ("failure", "error", "skipped"))


def runtime(client: Client, environments: Path) -> str:
    """What runs the client, such as "Python 3.11.7"."""
    command = [str(client.runtime(environments)), "--version"]
    version = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return version.replace("v", "Node ") if client.node else version


def main() -> None:
    """Runs a command of the module's docstring."""
    match sys.argv[1:]:
        case ["install", folder, *names]:
            for client in chosen(names, (*CLIENTS, SCHEMATHESIS)):
                client.install(Path(folder).absolute())
        case ["run", folder, *names]:
            results = run(chosen(names), Path(folder).absolute())
            write(PAGE, read(PAGE) | results)
            if failed := [client.name for client, result in results.items() if not (result.passed and result.behind)]:
                raise SystemExit(f"failed: {', '.join(failed)}")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
