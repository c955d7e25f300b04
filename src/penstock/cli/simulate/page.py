"""Makes the page of a simulation: one file, with its plots and data, that loads nothing from elsewhere."""

import json
from html import escape
from importlib.resources import files
from typing import Any

_PLACES = ("uplot.css", "uplot.js")  # in frontend/pages/vendor


def page_of(report: dict[str, Any]) -> str:
    """Returns the page of a report, which is what --json has."""
    vendor = files("penstock.frontend.pages").joinpath("vendor")
    style, plots = (vendor.joinpath(name).read_text(encoding="utf-8") for name in _PLACES)
    own = files(__package__)
    # In a script element, only "</" could end the text. "<" is escaped so that no value can.
    data = json.dumps(report).replace("<", "\\u003c")
    page = own.joinpath("page.html").read_text(encoding="utf-8")
    for name, text in (
        ("{title}", escape(report["title"])),
        ("{about}", escape(report["about"].strip())),
        ("{vendor-style}", style),
        ("{style}", own.joinpath("page.css").read_text(encoding="utf-8")),
        ("{plots}", plots),
        ("{script}", own.joinpath("page.js").read_text(encoding="utf-8")),
        ("{data}", data),  # the last one: no text in it is replaced
    ):
        page = page.replace(name, text, 1)
    return page
