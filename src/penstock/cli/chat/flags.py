"""Defines the flags that only `penstock run` has."""

from math import isinf
from typing import Annotated, Any

import typer

from penstock.cli.options import Flags
from penstock.declared.sampling import SAMPLING, SamplingParameter

_MOST = {"temperature": 100}  # the API takes any finite one


def _flag(name: str, parameter: SamplingParameter) -> Any:
    most = _MOST.get(name, parameter.most)
    option = typer.Option(metavar="N", min=parameter.least, max=None if isinf(most) else most, help=parameter.help)
    return Annotated[int | None, option] if parameter.whole else Annotated[float | None, option]


SAMPLING_FLAGS: Flags = {
    **{name: _flag(name, parameter) for name, parameter in SAMPLING.items()},
    "seed": Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=2**64 - 1, help="The same seed gives the same answer. Default: a random one."
        ),
    ],
    "max_tokens": Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most tokens of an answer. Default: 2048, with --raw 256.")
    ],
}
CHAT: Flags = {
    **SAMPLING_FLAGS,
    "system": Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt of the conversation.")],
    "raw": Annotated[bool | None, typer.Option("--raw", help="Complete the text as it is, without a chat template.")],
    "stats": Annotated[
        bool | None,
        typer.Option("--stats", help="Show tokens per second and time to first token after each answer."),
    ],
    "history": Annotated[
        bool | None,
        typer.Option("--history/--no-history", help="Keep the prompts for the Up key of later sessions. Default: on."),
    ],
}
