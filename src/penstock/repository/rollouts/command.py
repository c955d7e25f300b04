"""An operator's own judge: a command that reads pairs of answers and scores them."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.environment import child_environment

OWN, OWN_TOLERANCE = "own", 0.1  # the judge's name, and what it tolerates by default
ANSWER_SECONDS = 30.0  # that the command may take for a pair
_Score = Annotated[float, msgspec.Meta(ge=-1, le=1)] | None
_log = logging.getLogger("penstock.repository")


class CommandJudge:
    """Writes a pair as a line of JSON to the standard input of a command in `folder`, and reads a number, or null. It
    runs until `close`, which must follow a call that is cancelled. After a failure the next pair starts it again."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._one = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, pair: Callable[[], Mapping[str, Any]]) -> float | None:
        """Returns how much worse the candidate's answer is, in [-1, 1]. None: the command says nothing, or fails, which
        is logged. An answer of more than 64 KiB is a failure."""
        async with self._one:
            try:
                line = msgspec.json.encode(pair()) + b"\n"
                async with asyncio.timeout(ANSWER_SECONDS):
                    if self._process is None:
                        pipe, env = asyncio.subprocess.PIPE, child_environment(os.environ)
                        self._process = await asyncio.create_subprocess_exec(
                            *self._command, stdin=pipe, stdout=pipe, cwd=self._folder, env=env
                        )
                    assert self._process.stdin is not None and self._process.stdout is not None
                    self._process.stdin.write(line)
                    await self._process.stdin.drain()
                    found: float | None = msgspec.json.decode(await self._process.stdout.readline(), type=_Score)
                    return found
            except (OSError, ValueError, msgspec.MsgspecError) as error:  # TimeoutError is an OSError
                reason = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
                _log.warning("the judge %s must answer each line with a number from -1 to 1: %s", self._command, reason)
                await self.close()
                return None

    async def close(self) -> None:
        """Ends the command. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
