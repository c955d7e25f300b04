"""Drawing a token from each row's filtered distribution: the winner of log p + noise among the tokens its filters keep.

Filters by rank or share need a sort in principle, and a large vocabulary has few tokens that matter. So:

- top_k rows keep k tokens: they are found without a sort, and the rest is exact arithmetic on k numbers.
- Otherwise the winner among all tokens is found first, and then asked whether top_p keeps it: whether the tokens ahead
  of it hold less than the share p. It does with probability p. If not, it and all behind it are out, and the winner
  among those ahead of it is next. No sort, no cumulative sum, and yet exactly the winner among the tokens kept.
- Noise is the dearest part. It is computed only for tokens that a floor under the kept set leaves, and only as an
  integer hash: logarithms are taken for the few tokens whose hash is good enough to overtake a known contender.

Every decision is exact, whichever way it was reached, so a row's token cannot depend on the rows beside it.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.runtime import noise
from penstock.runtime.selection import Candidates, Logits, best_first, count, gather

Number = TypeVar("Number", bound=np.generic)

BLOCK_LOGITS = 1 << 19  # logits per pass: a few rows share its overhead, and its arrays stay in the cache

# float32 shares of the mass may be off by a few 1e-6 of it: 3 * 2**-24 * ln(vocab) from rounding the exponents, whose
# mean is at most ln(vocab), 3 ulp from exp, and a pairwise sum's. Closer to p, the decision is made again in float64.
SHARE_UNCERTAINTY = 2e-5
NEAR = 8.0  # a token whose log p is this much below the best's is a contender only with extraordinary noise
SCOUTS = 256  # tokens of a row whose scores are computed first, to know a lead: about so many of the best noise


class Draws(NamedTuple):
    """What decides a token besides the logits: arrays [rows]."""

    temperature: NDArray[np.float64]  # > 0
    top_k: NDArray[np.int64]  # 0: off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    key: noise.Keys

    def take(self, index: NDArray[np.int64] | slice) -> "Draws":
        return Draws(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.key[index])


class _Field(NamedTuple):
    """Tokens of each row that may win: with a token, every better one of its row. Columns are in ascending id."""

    values: NDArray[np.float32]  # logits [rows, width]
    token_ids: NDArray[np.uint32] | None  # [rows, width]; None: a column's number is its token
    best: NDArray[np.int64]  # column of each row's best value, the lowest of equals
    top: NDArray[np.float64]  # that value
    floor: NDArray[np.float32]  # a value below its row's floor cannot win

    def tokens(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        return columns if self.token_ids is None else self.token_ids[np.arange(len(columns)), columns].astype(np.int64)

    def of_rows(self, index: NDArray[np.bool_]) -> "_Field":
        if index.all():
            return self
        ids = None if self.token_ids is None else self.token_ids[index]
        return _Field(self.values[index], ids, self.best[index], self.top[index], self.floor[index])

    def among(self, marks: NDArray[np.bool_]) -> "_Field":
        """The same rows with the marked tokens alone; each row's best is one."""
        found = gather(self.values, marks, self.token_ids)
        return self._replace(values=found.values, token_ids=found.token_ids, best=found.values.argmax(axis=1))


class TokenDrawer:
    """Draws tokens. Owns buffers for it, so that a step allocates little of the vocabulary's size."""

    def __init__(self, vocab_size: int) -> None:
        self._block = max(1, BLOCK_LOGITS // vocab_size)
        self._all_ids = np.arange(vocab_size, dtype=np.uint32)
        size = self._block * vocab_size
        self._hashes = np.empty(size, np.uint32)
        self._scratch = np.empty(size, np.uint32)
        self._weights = np.empty(size, np.float32)
        self._marks = np.empty(size, np.bool_)
        self._few = np.empty(size, np.bool_)

    @np.errstate(divide="ignore", over="ignore")  # a filter that is off lies at log 0
    def draw(self, logits: Logits, rows: NDArray[np.int64], best: NDArray[np.int64], draws: Draws) -> NDArray[np.int64]:
        """A token of each of the logits' `rows`, none of which has a top_k. The logits are left as they are.

        `best` and `draws` are of those rows; `best` is each one's best token, the lowest of equals, and finite.
        """
        tokens = np.empty(len(rows), np.int64)
        for first in range(0, len(rows), self._block):
            part = slice(first, first + self._block)
            block, of_part = _of_rows(logits, rows[part]), draws.take(part)
            top = block[np.arange(len(block)), best[part]].astype(np.float64)
            field = _Field(block, None, best[part], top, _min_p_floor(top, of_part))
            tokens[part] = (self._draw if (of_part.top_p >= 1).all() else self._draw_share)(field, of_part)
        return tokens

    @np.errstate(divide="ignore", over="ignore")
    def draw_top_k(self, logits: Logits, rows: NDArray[np.int64], draws: Draws) -> NDArray[np.int64]:
        """A token of each of the logits' `rows`, each of which has a top_k."""
        tokens = np.empty(len(rows), np.int64)
        for first in range(0, len(rows), self._block):
            part = slice(first, first + self._block)
            of_part = draws.take(part)
            ranked = best_first(_of_rows(logits, rows[part]), int(of_part.top_k.max()))
            tokens[part] = _draw_ranked(ranked, of_part)
        return tokens

    def _draw(self, field: _Field, draws: Draws) -> NDArray[np.int64]:
        """Tokens of rows without top_p."""
        if (draws.min_p > 0).all():
            field = self._narrow(field, field.floor)
        return field.tokens(self._winners(field, draws))

    def _draw_share(self, whole: _Field, draws: Draws) -> NDArray[np.int64]:
        """Tokens of rows of which some have a top_p."""
        weights = self._weigh(whole, draws)
        mass = weights.sum(axis=1)
        field = self._narrow(whole, np.maximum(whole.floor, _top_p_floor(whole, mass, draws)))
        if field is not whole:
            weights = self._weigh(field, draws)
        tokens = np.empty(len(mass), np.int64)
        waiting = np.arange(len(mass))  # the rows of `field`: those without a token yet
        while True:
            columns = self._winners(field, draws)
            tokens[waiting] = field.tokens(columns)
            if (columns == field.best).all():  # nothing is ahead of them
                return tokens
            ahead = self._ahead(field, columns)
            share = np.multiply(weights, ahead.view(np.uint8), out=weights).sum(axis=1)
            surplus = share - draws.top_p * mass
            outside = surplus >= 0
            for i in np.flatnonzero(np.abs(surplus) <= SHARE_UNCERTAINTY * mass):
                row = waiting[i]
                outside[i] = _outside(whole.values[row], tokens[row], draws.temperature[i], draws.top_p[i])
            # The best token is always kept, and a share of 1 keeps all, those of no weight included.
            outside &= (columns != field.best) & (draws.top_p < 1)
            if not outside.any():
                return tokens
            field = field.of_rows(outside).among(ahead[outside])
            waiting, draws, mass = waiting[outside], draws.take(outside), mass[outside]
            weights = self._weigh(field, draws)

    def _narrow(self, field: _Field, floor: NDArray[np.float32]) -> _Field:
        """The field without the tokens below the floor, where they are so many that gathering the others pays."""
        marks = np.greater_equal(field.values, floor[:, None], out=_view(self._marks, field.values))
        return field.among(marks) if count(marks).max() * 16 < marks.shape[1] else field

    def _weigh(self, field: _Field, draws: Draws) -> NDArray[np.float32]:
        """Probabilities relative to the best token's, [rows, width]."""
        weights = np.subtract(
            field.values, field.top.astype(np.float32)[:, None], out=_view(self._weights, field.values)
        )
        weights *= (1 / draws.temperature).astype(np.float32)[:, None]
        return np.exp(weights, out=weights)

    def _winners(self, field: _Field, draws: Draws) -> NDArray[np.int64]:
        """The column of each row's greatest log p + noise, the lowest of equals."""
        values = field.values
        rows, width = values.shape
        hashes = noise.hash_tokens(
            self._all_ids if field.token_ids is None else field.token_ids,
            draws.key,
            out=_view(self._hashes, values),
            scratch=_view(self._scratch, values),
        )

        def score(row: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.float64]:
            value = values[row, column]
            log_p = (value - field.top[row]) / draws.temperature[row]
            return np.where(value >= field.floor[row], log_p + noise.gumbel(hashes[row, column]), -np.inf)

        def marked() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            flat = np.flatnonzero(marks)
            row = flat // width
            return row, flat - row * width

        marks, few = _view(self._marks, values), _view(self._few, values)
        each = np.arange(rows)
        lead = score(each, field.best)
        np.less_equal(hashes, np.uint32(noise.MAX_HASH * min(1.0, SCOUTS / width)), out=marks)
        row, column = marked()
        np.maximum.at(lead, row, score(row, column))
        # To reach the lead, a token needs that much noise; and NEAR more where its log p is NEAR below the best.
        near = np.nextafter((field.top - NEAR * draws.temperature).astype(np.float32), np.float32(-np.inf))
        np.greater_equal(values, np.maximum(near, field.floor)[:, None], out=marks)
        marks &= np.less_equal(hashes, noise.hash_reaching(lead)[:, None], out=few)
        marks |= np.less_equal(hashes, noise.hash_reaching(lead + NEAR)[:, None], out=few)
        row, column = marked()
        scores = score(row, column)
        best = np.maximum.reduceat(scores, np.searchsorted(row, each))  # each row's leader is marked
        winning = np.flatnonzero(scores == best[row])[::-1]
        columns = np.empty(rows, np.int64)
        columns[row[winning]] = column[winning]  # of equals the last written stays, which is the lowest
        return columns

    def _ahead(self, field: _Field, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Marks of the tokens that come before the given one: those of a better value, and equal ones of a lower id."""
        value = field.values[np.arange(len(columns)), columns][:, None]
        ahead = np.greater(field.values, value, out=_view(self._marks, field.values))
        equal = np.equal(field.values, value, out=_view(self._few, field.values))
        for i in np.flatnonzero(count(equal) > 1):
            ahead[i, : columns[i]] |= equal[i, : columns[i]]
        return ahead


def _draw_ranked(ranked: Candidates, draws: Draws) -> NDArray[np.int64]:
    """Tokens of rows whose best ones are given best first, at least top_k of them."""
    values = ranked.values.astype(np.float64)
    log_p = (values - values[:, :1]) / draws.temperature[:, None]
    log_p[np.arange(values.shape[1]) >= draws.top_k[:, None]] = -np.inf
    # Sums run along a row from its best token on, whatever padding follows.
    cumulative = np.cumsum(np.exp(log_p), axis=1)
    kept = log_p >= np.log(draws.min_p)[:, None]
    kept[:, 1:] &= (cumulative[:, :-1] < (draws.top_p * cumulative[:, -1])[:, None]) | (draws.top_p >= 1)[:, None]
    hashes = noise.hash_tokens(
        ranked.token_ids, draws.key, np.empty_like(ranked.token_ids), np.empty_like(ranked.token_ids)
    )
    best = np.where(kept, log_p + noise.gumbel(hashes), -np.inf).argmax(axis=1)
    tokens: NDArray[np.uint32] = ranked.token_ids[np.arange(len(best)), best]
    return tokens.astype(np.int64)


def _outside(logits: NDArray[np.float32], token: int, temperature: float, top_p: float) -> bool:
    """Whether the tokens ahead of this one hold the share top_p already: [vocab], in float64."""
    weights = np.exp((logits - logits.max().astype(np.float64)) / temperature)
    ahead = logits > logits[token]
    ahead[:token] |= logits[:token] == logits[token]
    return bool(weights[ahead].sum() >= top_p * weights.sum())


def _min_p_floor(top: NDArray[np.float64], draws: Draws) -> NDArray[np.float32]:
    """The least float32 logit whose probability is min_p times the best one's."""
    exact = top + draws.temperature * np.log(draws.min_p)
    floor = exact.astype(np.float32)
    return np.where(floor < exact, np.nextafter(floor, np.float32(np.inf)), floor)


def _top_p_floor(field: _Field, mass: NDArray[np.float32], draws: Draws) -> NDArray[np.float32]:
    """A logit below which top_p keeps no token.

    A token kept has less than top_p of the mass ahead of it, so it and those behind it hold more than the rest,
    1 - top_p. They are at most the vocabulary, each no heavier than it: its weight exceeds (1 - top_p) mass / vocab.
    """
    log_weight = np.log((1 - draws.top_p) * mass / field.values.shape[1])
    floor: NDArray[np.float64] = field.top + draws.temperature * (log_weight - 0.001)  # lower by more than rounding
    return floor.astype(np.float32)


def _of_rows(logits: Logits, rows: NDArray[np.int64]) -> Logits:
    """Those rows, as a view where they lie together."""
    first, last = rows[0], rows[-1]
    return logits[first : last + 1] if last - first == len(rows) - 1 else logits[rows]


def _view(buffer: NDArray[Number], like: NDArray[np.generic]) -> NDArray[Number]:
    """The start of a flat buffer in another array's shape."""
    return buffer[: like.size].reshape(like.shape)
