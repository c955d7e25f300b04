"""A command whose engine does not serve."""

import pytest

from penstock.messages import EngineError
from penstock.weights.packaged import embedded_model
from tests.cli.conftest import RunCommand


@pytest.mark.parametrize("command", [("run", str(embedded_model()), "x"), ("bench", "throughput", "--cases", "1x8/8")])
def test_why_it_does_not_is_one_clear_line(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    async def start(*arguments: object, **options: object) -> None:
        raise EngineError("the engine met its end")

    monkeypatch.setattr("penstock.prepare.engine.spawn", start)
    monkeypatch.setattr("penstock.prepare.engine.connect", start)
    done = run_command(*command)
    progress = "measuring the machine (1 s)\n"  # if that takes so long here
    said = done.stderr.removeprefix(progress)
    assert (done.returncode, done.stdout, said) == (1, "", "penstock: the engine met its end\n")
