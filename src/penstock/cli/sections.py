"""Headings for the flags of settings in a command's help."""

from collections.abc import Mapping
from typing import Any

from penstock.cli.usage import PlainUsage
from penstock.declared.settings import ENGINE, SERVER

OWN = "Options"  # of settings that have no heading of their own
SECTIONS: Mapping[str, tuple[str, ...]] = {
    heading: (
        *(["config"] if heading == "Model" else []),
        *(setting.name for table in (ENGINE, SERVER) for setting in table.get(heading, ())),
    )
    for heading in dict.fromkeys((*ENGINE, *SERVER))
    if heading != OWN
}
_PLACES = {name: (heading, place) for heading, names in SECTIONS.items() for place, name in enumerate(names)}


class SectionedHelp(PlainUsage):
    """A command that takes settings: its help has its own flags first, then those of settings below headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[int, Any]]] = {"Arguments": [], OWN: [], **{heading: [] for heading in SECTIONS}}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                own = ("Arguments" if parameter.param_type_name == "argument" else OWN, 0)
                heading, place = _PLACES.get(parameter.name or "", own)
                rows[heading].append((place, record))
        for heading, found in rows.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl([record for _, record in sorted(found, key=lambda row: row[0])])
