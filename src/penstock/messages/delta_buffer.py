"""Deltas that wait for a slow reader, merged to at most one for each choice.

Both ends of a link use this: the engine while its client's socket is full, the client while a consumer is busy. The
size is bounded by the tokens that running requests may produce.
"""

from penstock.messages.delta import TokenDelta


class DeltaBuffer:
    """Deltas in order of arrival, merged per choice."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], TokenDelta] = {}  # the first of each choice
        self._merged: dict[tuple[str, int], _Merged] = {}  # where others followed it

    def push(self, delta: TokenDelta) -> None:
        """Add a delta. Raises ValueError when tokens are missing between it and the one that waits."""
        key = (delta.request_id, delta.choice)
        first = self._waiting.get(key)
        if first is None:
            self._waiting[key] = delta
            return
        merged = self._merged.get(key)
        if merged is None:
            merged = self._merged[key] = _Merged(first)
        merged.append(delta)

    def take(self) -> list[TokenDelta]:
        """Remove and return all."""
        waiting, self._waiting = self._waiting, {}
        if self._merged:
            waiting.update({key: merged.delta() for key, merged in self._merged.items()})
            self._merged = {}
        return list(waiting.values())


class _Merged:
    """Several deltas of one choice as one. Appending costs what is appended, not what waits already."""

    __slots__ = ("_cached_tokens", "_last", "_logprobs", "_offset", "_prompt_logprobs", "_token_ids")

    def __init__(self, first: TokenDelta) -> None:
        self._last = first
        self._offset = first.offset
        self._token_ids = list(first.token_ids)
        self._logprobs = bytearray(first.logprobs)
        self._prompt_logprobs = first.prompt_logprobs
        self._cached_tokens = first.cached_tokens

    def append(self, delta: TokenDelta) -> None:
        self._cut(delta.offset)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        self._last = delta

    def delta(self) -> TokenDelta:
        last = self._last
        return TokenDelta(
            last.request_id,
            last.choice,
            self._offset,
            tuple(self._token_ids),
            last.finish_reason,
            last.stop_token,
            self._cached_tokens,
            bytes(self._logprobs),
            self._prompt_logprobs,
            last.error,
            last.timing,
            last.incarnation,
            last.pooled,
        )

    def _cut(self, end: int) -> None:
        """Drop tokens from position `end` on: the choice was truncated before its last tokens had been read."""
        have = len(self._token_ids)
        keep = end - self._offset
        if keep > have:
            name = f"{self._last.request_id}, choice {self._last.choice}"
            raise ValueError(f"{name}: tokens {self._offset + have} to {end - 1} are missing")
        if keep < have:
            keep = max(keep, 0)
            del self._logprobs[keep * (len(self._logprobs) // have) :]
            del self._token_ids[keep:]
        self._offset = min(self._offset, end)
