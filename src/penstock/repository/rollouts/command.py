"""An operator's own judge: a command that reads pairs of answers and scores them."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson

from penstock.environment import child_environment

OWN, OWN_TOLERANCE = "own", 0.1  # the judge's name, and what it tolerates by default
ANSWER_SECONDS = 30.0  # that the command may take for a pair
MAX_PAIR_BYTES = 1 << 20  # a larger pair is not judged
_Score = Annotated[float, msgspec.Meta(ge=-1, le=1)] | None
_log = logging.getLogger("penstock.repository")


class CommandJudge:
    """Writes a pair as a line of JSON to the command's standard input, and reads a line with a number, or null. The
    command runs until `close`; after a failure the next pair starts it again. A call that is cancelled must be followed
    by `close`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """`folder` is the command's working directory."""
        self._command, self._folder = command, folder
        self._one = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, pair: Mapping[str, Any]) -> float | None:
        """Returns how much worse the candidate's answer is, in [-1, 1]. None: the command says nothing, or fails, which
        is logged."""
        line = orjson.dumps(pair, option=orjson.OPT_APPEND_NEWLINE)
        if len(line) > MAX_PAIR_BYTES:
            return None
        async with self._one:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return msgspec.json.decode(await self._answer(line), type=_Score)
            except (OSError, ValueError, msgspec.MsgspecError) as error:  # TimeoutError is an OSError
                reason = str(error) or f"no answer in {ANSWER_SECONDS:g} s"
                _log.warning("the judge %s must answer each line with a number from -1 to 1: %s", self._command, reason)
                await self.close()
                return None

    async def close(self) -> None:
        """Ends the command. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                process.kill()
            await process.wait()

    async def _answer(self, line: bytes) -> bytes:
        """Raises OSError, and ValueError for a line of more than 64 KiB."""
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, cwd=self._folder, env=child_environment(os.environ)
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        await self._process.stdin.drain()
        return await self._process.stdout.readline()
