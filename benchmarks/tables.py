"""Writes the tables of benchmarks/README.md that are made of results/: whole cases, for each instruction set.

python benchmarks/tables.py
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- made by tables.py -->\n", "<!-- end -->"
ISAS = {"avx2": "AVX2", "avx512": "AVX512", "avx512_bf16": "AVX512 with BF16", "amx": "AMX"}
DRAFTED, HELD, DISTURBED = "†", "‡", "§"
NOTES = {
    DRAFTED: "With speculation, whose drafts guess the repetitions of random weights: the figure is too high.",
    HELD: "On a processor with a better instruction set (`best_isa` in the file), held to this one, as were the peers.",
    DISTURBED: "Something else, such as another guest, took a part of the cores for over a fifth of the time.",
}

Figures = dict[str, Any]


def comparisons(isa: str) -> dict[tuple[str, ...], list[tuple[str, Figures]]]:
    """The results of compare.py on machines with this instruction set, with file names, by the cases that were run."""
    found: dict[tuple[str, ...], list[tuple[str, Figures]]] = {}
    for path in sorted((RESULTS / isa).glob("*.json")):
        figures = json.loads(path.read_text())
        if isinstance(figures, dict) and figures.get("benchmark") == "compare" and "tok_s" in figures:
            cases = tuple(next(iter(figures["tok_s"].values())))
            found.setdefault(cases, []).append((path.name, figures))
    return found


def table(cases: tuple[str, ...], runs: list[tuple[str, Figures]]) -> str:
    """A table: a row for each engine of each run, a column for each case, and ours over the best peer."""
    lines = ["| file, commit | engine | " + " | ".join(f"`{case}`" for case in cases) + " |"]
    lines.append("|---" * (len(cases) + 2) + "|")
    for name, figures in runs:
        peers = figures.get("peers", {})
        held = f" {HELD}" if "best_isa" in figures["hardware"] else ""
        label = f"`{name}`, {figures['commit']}{held}"
        for engine, rates in figures["tok_s"].items():
            ratios = figures["over_best_peer"].get(engine, {})
            runs_of = figures["last_run"].get(engine, {})
            calm = figures.get("calm", {}).get(engine, {})
            cells = [
                cell(rates.get(case), ratios.get(case))
                + drafts(case, runs_of.get(case))
                + (f" {DISTURBED}" if calm.get(case) is False else "")
                for case in cases
            ]
            version = f" {peers[engine]}" if engine in peers else ""
            lines.append(f"| {label} | {engine}{version} | " + " | ".join(cells) + " |")
            label = ""
    return "\n".join(lines) + "\n"


def cell(rate: float | None, ratio: float | None) -> str:
    if rate is None:
        return "–"
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
    return text if ratio is None else f"{text} ({ratio:.2f}×)"


def drafts(case: str, run: Figures | None) -> str:
    """A mark if one of our engines made a case's tokens in fewer steps than tokens: then it verified drafts."""
    tokens = int(case.rpartition("/")[2])
    return f" {DRAFTED}" if run is not None and run.get("steps", tokens) < tokens else ""


def tables() -> str:
    parts = []
    for isa, title in ISAS.items():
        found = [table(cases, runs) for cases, runs in comparisons(isa).items()]
        text = "\n".join(found) if found else "Not measured.\n"
        notes = "".join(f"\n{mark} {note}\n" for mark, note in NOTES.items() if mark in text)
        parts.append(f"#### {title}\n\n{text}{notes}")
    return "\n".join(parts)


def main() -> None:
    text = README.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README} has no place for the tables: {BEGIN.strip()} and {END}")
    README.write_text(f"{head}{BEGIN}\n{tables()}\n{END}{tail}")


if __name__ == "__main__":
    main()
