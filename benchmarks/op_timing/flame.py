"""Draws the time of steps as SVG: one bar for each step, with groups of ops above and the ops below."""

from collections.abc import Sequence
from html import escape

from op_timing.step_timer import HOST, WHOLE, StepBreakdown, StepPart

# By group: its parts in the order of a layer, and the hue of its colour.
GROUPS: dict[str, tuple[tuple[str, ...], int]] = {
    "attention": (("qkv", "cache", "attention", "output"), 212),
    "MLP": (("gate_up", "up", "down"), 152),
    "head": (("head",), 268),
    "small ops": (("norm", "embedding", "rotation"), 40),
    "host": (HOST, 350),
}
WIDTH, MARGIN, BAR = 1120, 24, 1072
CHARACTER = 6.7  # px, the width of a character in a label
GROUP_HEIGHT, PART_HEIGHT, HEADING, STEP_HEIGHT = 22, 40, 30, 136


def flame(breakdowns: Sequence[StepBreakdown], title: str) -> str:
    """Returns an SVG of all steps, each drawn to its own scale. Parts too narrow for their names are listed below."""
    height = 60 + STEP_HEIGHT * len(breakdowns) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(MARGIN, 32, title, size=16, weight=600),
    ]
    for i, each in enumerate(breakdowns):
        parts += _step(each, 60 + STEP_HEIGHT * i)
    return "\n".join([*parts, "</svg>\n"])


def _step(step: StepBreakdown, top: float) -> list[str]:
    sequences = "1 sequence" if step.rows == 1 else f"{step.rows} sequences"
    prompt = f"{step.prompt:,} tokens of each prompt, " if step.prompt else ""
    whole = f"{sequences}, {prompt}{step.context:,} tokens of context: {_duration(step.us)} a step"
    drawn = [_text(MARGIN, top + 18, whole, size=13, weight=600)]
    left, narrow = float(MARGIN), []
    lines = {line.name: line for line in step.lines if line.name != WHOLE}
    for group, (names, hue) in _groups(lines).items():
        inside = [lines[name] for name in names if name in lines]
        begin = left
        for i, line in enumerate(inside):
            width = line.us / step.us * BAR
            colour = f"hsl({hue}, 62%, {80 - 22 * i / max(len(inside) - 1, 1):.0f}%)"
            drawn.append(_box(left, top + HEADING + GROUP_HEIGHT, width, PART_HEIGHT, colour, _words(line)))
            if fits := _fits([line.name, f"{line.share:.1%}"], width):
                at = top + HEADING + GROUP_HEIGHT + 17
                drawn += [_text(left + 5, at + 15 * j, word) for j, word in enumerate(fits)]
            else:
                narrow.append(line)
            left += width
        share = sum(line.share for line in inside)
        words = f"{group}: {_duration(sum(line.us for line in inside))}, {share:.1%}"
        drawn.append(_box(begin, top + HEADING, left - begin, GROUP_HEIGHT, f"hsl({hue}, 45%, 38%)", words))
        if label := next((text for text in (words, group) if _fits([text], left - begin)), ""):
            drawn.append(_text(begin + 5, top + HEADING + 15, label, colour="#ffffff"))
    if narrow:
        listed = "narrow: " + ", ".join(f"{line.name} {line.share:.1%}" for line in narrow)
        drawn.append(_text(MARGIN, top + HEADING + GROUP_HEIGHT + PART_HEIGHT + 17, listed, colour="#555555"))
    return drawn


def _groups(lines: dict[str, StepPart]) -> dict[str, tuple[tuple[str, ...], int]]:
    """The GROUPS that occur in a step. Parts that are in none of them form the group "other"."""
    known = {name for names, _ in GROUPS.values() for name in names}
    others = tuple(name for name in lines if name not in known)
    groups = GROUPS | ({"other": (others, 0)} if others else {})
    return {group: each for group, each in groups.items() if any(name in lines for name in each[0])}


def _fits(texts: list[str], width: float) -> list[str]:
    return texts if max(map(len, texts)) * CHARACTER + 8 <= width else []


def _words(line: StepPart) -> str:
    words = f"{line.name}: {_duration(line.us)}, {line.share:.1%}"
    if line.gb_s is not None:
        words += f", {line.calls} calls, {line.gb_s:,} GB/s"
    if line.gflop_s is not None:
        words += f", {line.gflop_s:,} GFLOP/s"
    return words


def _duration(us: float) -> str:
    return f"{us:,.0f} µs" if us < 10_000 else f"{us / 1e3:,.1f} ms"


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}" stroke="#ffffff" '
        f'stroke-width="0.7"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, words: str, *, size: int = 12, weight: int = 400, colour: str = "#1a1a1a") -> str:
    return (
        f'<text x="{x:.2f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'pointer-events="none">{escape(words)}</text>'
    )
