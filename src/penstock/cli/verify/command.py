"""The command: runs every check, prints what was found, and returns an exit status for scripts."""

import asyncio

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.options import Flags
from penstock.cli.output import write_json
from penstock.cli.verify.answers import QUESTIONS, WINDOWS, ModelAnswer, check_answers
from penstock.cli.verify.finding import Finding
from penstock.cli.verify.text_checks import check_text
from penstock.config import format_bytes, stored_as
from penstock.config.weights import weights_bytes
from penstock.observe.reporting import reporting
from penstock.prepare.engine import own_engine
from penstock.prepare.files import check_file
from penstock.prepare.model import PreparedModel, prepare
from penstock.text import Tokenizer

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def verify(model: str | None, json_file: str | None, flags: Flags) -> int:
    """Checks a model as it is loaded with these flags. Returns the exit status: 1 if there is a problem, else 0."""
    check_file("--json", json_file)
    prepared = prepare(model, flags)
    tokenizer = Tokenizer.load(prepared.path)
    findings = [_weights(prepared), *check_text(tokenizer, prepared.facts.eos_token_ids, prepared.facts.vocab_size)]
    more, answers = asyncio.run(_with_engine(prepared, tokenizer))
    findings += more
    name = prepared.resolved.engine.name
    _show(name, findings)
    figures = {"model": name, "findings": findings, "answers": answers}
    write_json(json_file, msgspec.to_builtins(figures))
    return int(any(finding.status == "problem" for finding in findings))


def _weights(prepared: PreparedModel) -> Finding:
    """The types of the weights in memory."""
    facts, engine = prepared.facts, prepared.resolved.engine
    size = weights_bytes(facts, engine)
    kept = stored_as(engine, facts.isa, [matrix.stored for matrix in facts.matrices if not matrix.router])
    bits = 8 * size / facts.num_parameters
    return Finding("weights", "ok", f"{kept}; {format_bytes(size)} in memory, {bits:.3g} bits a weight")


async def _with_engine(prepared: PreparedModel, tokenizer: Tokenizer) -> tuple[list[Finding], list[ModelAnswer]]:
    engine = msgspec.structs.replace(prepared.resolved.engine, log_level="warning")
    done, total = 0, len(QUESTIONS) + 1 + WINDOWS
    with reporting(f"starting the engine for {engine.name}") as say:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            say(f"{done} of {total} questions and texts done")

        async with own_engine(engine) as client:
            advance(0)
            return await check_answers(client, tokenizer, prepared.generation, advance)


def _show(name: str, findings: list[Finding]) -> None:
    table = Table(title=f"{name}, as clients will meet it", title_justify="left", show_lines=False)
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        found = finding.found if not finding.remedy else f"{finding.found}\n→ {finding.remedy}"
        table.add_row(finding.check, f"[{STYLES[finding.status]}]{finding.status}[/]", escape(found))
    console = Console()
    console.print(table)
    counts = (f"{sum(each.status == status for each in findings)} {status}" for status in STYLES)
    console.print(f"{len(findings)} checks: {', '.join(counts)}")
