"""An executor that computes nothing but holds the scheduler to its word.

Every slot of every page holds the hash of the tokens that its KV depends on. A computed token looks at each position
it would attend to and fails where the slot holds anything else: a block handed out too early, shared by two writers,
copied wrongly or given back too soon shows at once. Tokens are a function of (prefix, seed, choice, index) alone, so
the output of a request is known beforehand, whatever was scheduled around it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.messages import (
    Capacity,
    GenerateRequest,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Work,
    pack_row,
)
from penstock.schedule import SchedulerConfig

VOCABULARY = 50

Touched = dict[tuple[int, int], set[int]]  # (group, block) -> sequences that held it when a plan used it


def mix(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def sample(prefix: int, sampling: SamplingParams, choice: int, index: int) -> int:
    """Output token `index` of a choice. Stop tokens are masked while `min_tokens` have not been given."""
    token = mix(prefix, sampling.seed, choice, index) % VOCABULARY
    while index < sampling.min_tokens and token in sampling.stops():
        token = (token + 1) % VOCABULARY
    return token


def prefix_hashes(tokens: list[int]) -> list[int]:
    hashes = []
    last = 0
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def expected_output(request: GenerateRequest, choice: int, max_model_len: int) -> tuple[list[int], str]:
    """The tokens of a choice and why it ends, from no scheduling at all."""
    sampling = request.sampling
    tokens = [*request.prompt_ids]
    output: list[int] = []
    last = prefix_hashes(tokens)[-1]
    while len(output) < sampling.max_tokens and len(tokens) + len(output) < max_model_len:
        token = sample(last, sampling, choice, len(output))
        last = mix(last, token)
        output.append(token)
        if token in sampling.stops() and len(output) > sampling.min_tokens:
            return output, "stop"
    return output, "length"


def logprob_row(token: int) -> bytes:
    return pack_row(TokenLogprobs(token, -token / 8, 1, ()))


@dataclass
class Row:
    """A sequence as an executor knows it."""

    tokens: list[int]
    hashes: list[int]
    num_prompt: int
    position: int
    tables: list[list[int]]
    sampling: SamplingParams
    choice: int
    failed: bool = False


@dataclass
class SimulatedExecutor:
    """Runs plans in order, at once; hands results out later. Any breach of the contract is an AssertionError."""

    capacity: Capacity
    config: SchedulerConfig
    fails: Callable[[SamplingParams, int, int], bool] = lambda sampling, choice, length: False
    rows: dict[int, Row] = field(default_factory=dict)
    results: deque[tuple[StepResult, Touched]] = field(default_factory=deque)
    last_plan: int = 0

    def __post_init__(self) -> None:
        self.pages: list[dict[int, list[object]]] = [{} for _ in self.capacity.groups]

    def submit(self, plan: StepPlan) -> None:
        assert plan.plan_id == self.last_plan + 1
        self.last_plan = plan.plan_id
        assert len(self.results) < self.capacity.depth
        assert plan.work
        if not self.capacity.late_ids:
            self._know_every_token(plan)
        self.touched: Touched = {}
        for seq in plan.gone:
            del self.rows[seq]
        for new in plan.new:
            self._meet(new)
        for seq, blocks in plan.blocks:
            assert any(blocks)
            for table, ids in zip(self.rows[seq].tables, blocks, strict=True):
                table.extend(ids)
        self._copy(plan)
        assert len(self.rows) <= self.config.max_num_seqs
        assert sum(work.count for work in plan.work) <= self.config.max_num_batched_tokens
        assert len({work.seq for work in plan.work}) == len(plan.work)
        results = tuple(self._compute(work) for work in plan.work)
        self.results.append((StepResult(plan.plan_id, results), self.touched))

    def result(self) -> StepResult:
        return self.results.popleft()[0]

    def recover(self, error: Exception) -> bool:
        if isinstance(error, MemoryError):
            self.rows.clear()
            self.results.clear()
        return isinstance(error, MemoryError)

    def _know_every_token(self, plan: StepPlan) -> None:
        """Nothing is computed from a token that has not been handed out; and plans leave something to each other."""
        depth = self.capacity.depth
        unknown = {answer.seq for result, _ in self.results for answer in result.results if answer.token_ids}
        assert not unknown & {work.seq for work in plan.work}
        assert sum(work.count for work in plan.work) <= -(-self.config.max_num_batched_tokens // depth)

    def _meet(self, new: NewSequence) -> None:
        assert new.seq not in self.rows
        assert 0 <= new.num_computed < len(new.token_ids)
        tokens = list(new.token_ids)
        self.rows[new.seq] = Row(
            tokens,
            prefix_hashes(tokens),
            new.num_prompt,
            new.num_computed,
            [list(table) for table in new.blocks],
            new.sampling,
            new.choice,
        )

    def _copy(self, plan: StepPlan) -> None:
        targets = {(copy.group, copy.target) for copy in plan.copies}
        sources = {(copy.group, copy.source) for copy in plan.copies}
        assert len(targets) == len(plan.copies)
        assert not targets & sources, "copies of one plan depend on their order"
        for copy in plan.copies:
            for seq, row in self.rows.items():
                if copy.source in row.tables[copy.group]:
                    self._touch(copy.group, copy.source, seq)
            self.touched.setdefault((copy.group, copy.source), set())
            self.pages[copy.group][copy.target] = list(self.pages[copy.group][copy.source])

    def _touch(self, group: int, block: int, seq: int) -> None:
        self.touched.setdefault((group, block), set()).add(seq)

    def _compute(self, work: Work) -> SequenceResult:
        row = self.rows[work.seq]
        known = work.count - work.drafts
        end = row.position + known
        assert known >= 1
        assert end == len(row.tokens) if work.sample else end < len(row.tokens)
        assert work.sample or not work.drafts
        unknown = {answer.seq for result, _ in self.results for answer in result.results if answer.token_ids}
        assert not work.drafts or work.seq not in unknown, "drafts do not follow the last token"
        row.failed = row.failed or self.fails(row.sampling, row.choice, len(row.tokens))
        if row.failed:
            for position in range(row.position, row.position + work.count):
                self._store(work.seq, row, position, "garbage")
            row.position += work.count
            row.tokens += [0] * (row.position + 1 - len(row.tokens)) if work.sample else []
            return SequenceResult(work.seq, error="simulated failure")
        start = row.position
        hashes = list(row.hashes)
        for token in work.draft_ids:
            hashes.append(mix(hashes[-1], token))
        for position in range(start, start + work.count):
            self._store(work.seq, row, position, hashes[position])
            self._attend(work.seq, row, position, hashes)
        row.position = end
        rows = b""
        if row.sampling.prompt_logprobs is not None:
            rows = b"".join(logprob_row(t) for t in row.tokens[start + 1 : min(end + 1, row.num_prompt)])
        if not work.sample:
            return SequenceResult(work.seq, prompt_logprobs=rows)
        accepted = []
        for draft in [*work.draft_ids, None]:
            token = sample(row.hashes[-1], row.sampling, row.choice, len(row.tokens) - row.num_prompt)
            accepted.append(token)
            row.tokens.append(token)
            row.hashes.append(mix(row.hashes[-1], token))
            if token != draft:
                break
        row.position = len(row.tokens) - 1
        limit = min(row.num_prompt + row.sampling.max_tokens, self.config.max_model_len)
        assert len(row.tokens) <= limit, "planned beyond what the sequence may have"
        logprobs = b"".join(map(logprob_row, accepted)) if row.sampling.logprobs is not None else b""
        return SequenceResult(work.seq, tuple(accepted), logprobs, rows)

    def _store(self, seq: int, row: Row, position: int, content: object) -> None:
        size = self.capacity.block_size
        index, slot = divmod(position, size)
        for group, table in enumerate(row.tables):
            block = table[index]
            assert 0 < block < self.capacity.groups[group].num_blocks
            for other in self.rows.values():
                if other is not row and not other.failed:
                    assert block not in other.tables[group][other.position // size :], "two writers share a block"
            for _, touched in self.results:
                assert seq in touched.get((group, block), {seq}), "an outstanding plan may still use this block"
            self._touch(group, block, seq)
            self.pages[group].setdefault(block, [None] * size)[slot] = content

    def _attend(self, seq: int, row: Row, position: int, hashes: list[int]) -> None:
        size = self.capacity.block_size
        for group, spec in enumerate(self.capacity.groups):
            tokens = spec.window.tokens or position + 1
            first = position - position % tokens if spec.window.chunked else max(0, position - tokens + 1)
            for seen in range(first, position + 1):
                block = row.tables[group][seen // size]
                self._touch(group, block, seq)
                page = self.pages[group].get(block)
                assert page is not None and page[seen % size] == hashes[seen], f"wrong KV at position {seen}"
