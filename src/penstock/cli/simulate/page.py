"""Makes the page of a simulation: one file, with its plots and data, that loads nothing from elsewhere."""

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

_PLACES = ("uplot.css", "uplot.js")  # in frontend/pages/vendor


def page_of(report: dict[str, Any]) -> str:
    """Returns the page of a report, which is what --json has. With `live`, names of scenarios, it is a page that runs
    them."""
    vendor = files("penstock.frontend.pages").joinpath("vendor")
    style, plots = (vendor.joinpath(name).read_text(encoding="utf-8") for name in _PLACES)
    own = files(__package__)
    # In a script element, only "</" could end the text. "<" is escaped so that no value can.
    data = json.dumps(report).replace("<", "\\u003c")
    texts = {
        "{title}": escape(report["title"]),
        "{about}": escape(report["about"].strip()),
        "{vendor-style}": style,
        "{style}": own.joinpath("page.css").read_text(encoding="utf-8"),
        "{plots}": plots,
        "{script}": own.joinpath("page.js").read_text(encoding="utf-8"),
        "{data}": data,
        "{connect}": "; connect-src 'self'" if "live" in report else "",
    }
    page = own.joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("|".join(map(re.escape, texts)), lambda place: texts[place[0]], page)
