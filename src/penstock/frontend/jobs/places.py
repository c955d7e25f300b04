"""Gives the places for requests in the engine to the open batches, which take turns."""

import asyncio
from collections import deque
from collections.abc import Callable

_LOOK_SECONDS = 0.05  # until the number of clients is looked at again


class BatchPlaces:
    """Counts the requests of batches in the engine. A place that becomes free goes to the batch that has been waiting
    longest, so batches of any size get equal numbers of places while they have requests left."""

    def __init__(self, most: Callable[[], int], others: Callable[[], int]) -> None:
        """There are `most` places, which a reload may change; a quarter of these while `others`, which counts the
        requests of clients in flight, is above 0."""
        self._most = most
        self._others = others
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Returns when the caller has a place, which it must give back."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._grant_after(0)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.give_back()
            raise

    def give_back(self, count: int = 1) -> None:
        self._taken -= count
        self._grant_after(0)

    def _grant_after(self, seconds: float) -> None:
        """Never grants at once: a batch that was given a place before must be able to line up again first."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._grant)

    def _grant(self) -> None:
        most = self._most()
        places = max(most // 4, 1) if self._others() else most
        while self._waiting and self._taken < places:
            place = self._waiting.popleft()
            if place.cancelled():
                continue
            self._taken += 1
            place.set_result(None)
        if self._waiting:
            self._grant_after(_LOOK_SECONDS)
