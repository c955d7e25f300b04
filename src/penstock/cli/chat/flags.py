"""Defines the flags that only `penstock run` has."""

from typing import Annotated

import typer

from penstock.cli.options import Flags

SAMPLING: Flags = {
    "temperature": Annotated[
        float | None, typer.Option(metavar="N", min=0, max=100, help="0 always takes the most likely token; 1 samples.")
    ],
    "top_p": Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, max=1, help="Sample from the most likely tokens that together have this probability."
        ),
    ],
    "top_k": Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Sample from this many most likely tokens; 0 is off.")
    ],
    "min_p": Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, max=1, help="Leave out tokens below this share of the most likely one's probability."
        ),
    ],
    "repetition_penalty": Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, max=100, help="Above 1: tokens of the prompt and the answer become less likely."
        ),
    ],
    "presence_penalty": Annotated[
        float | None, typer.Option(metavar="N", min=-2, max=2, help="Above 0: tokens of the answer become less likely.")
    ],
    "frequency_penalty": Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=-2,
            max=2,
            help="Above 0: the more often the answer has a token, the less likely it becomes.",
        ),
    ],
    "seed": Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=2**64 - 1, help="The same seed gives the same answer. Default: a random one."
        ),
    ],
    "max_tokens": Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most tokens of an answer. Default: 4096, with --raw 256.")
    ],
}
CHAT: Flags = {
    **SAMPLING,
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
