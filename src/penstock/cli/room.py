"""An engine with room for what a benchmark asks of it."""

from typing import NamedTuple

from penstock.cli.options import Flags
from penstock.cli.prepare import Prepared, find, prepare_found
from penstock.config import ConfigError
from penstock.families import model_facts


class Room(NamedTuple):
    asked: str  # what asks for the longest sequence: "--cases 1x256/64"
    tokens: int  # of that
    spare: int  # tokens more, where the model takes them
    rows: int  # sequences that run as one batch
    step: int = 0  # tokens computed in one step; 0: as the engine chooses


def prepare_room(model: str | None, flags: Flags, room: Room) -> Prepared:
    """As prepare.prepare, which says what is raised, with `room` where nothing was said about lengths and rows."""
    found = find(model, flags)
    given, made_for = found.given.settings.max_model_len, model_facts(found.spec).max_position
    if given is None:
        most, why = made_for, f"the model was made for at most {made_for}"
    else:
        most, why = given, f"--max-model-len ({found.given.sources['max_model_len']}) is {given}"
    if room.tokens > most:
        raise ConfigError(f"{room.asked} takes {room.tokens} tokens of context, but {why}; ask for {most} or fewer")
    wanted = {"max_model_len": min(room.tokens + room.spare, made_for), "max_num_seqs": room.rows}
    if room.step:
        most = found.given.settings.max_num_batched_tokens
        if most is not None and room.step > most:
            said = found.given.sources["max_num_batched_tokens"]
            raise ConfigError(
                f"{room.asked} is {room.step} tokens in a step, but --max-num-batched-tokens ({said}) is {most}; "
                "raise it or ask for less"
            )
        wanted["max_num_batched_tokens"] = room.step
    unsaid = {name: value for name, value in wanted.items() if getattr(found.given.settings, name) is None}
    return prepare_found(found.changed(f"for {room.asked}", **unsaid))
