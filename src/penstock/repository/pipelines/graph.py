"""A graph of nodes, and the switch, which has two graphs within it."""

import asyncio
from collections.abc import Collection, Coroutine, Sequence

from penstock.messages import RequestRejected
from penstock.messages.tensors import LoadFailed, TensorSpec
from penstock.repository.pipelines import nodes
from penstock.repository.pipelines.chain import with_chains
from penstock.repository.pipelines.expression import Expression, names_in
from penstock.repository.pipelines.rows import chosen_rows, scattered, values
from penstock.repository.settings import PipelineStep

MAX_PLANS = 64  # orders of nodes that are kept, by the outputs that they make


class Graph:
    """Nodes whose order follows from the tensors that they need."""

    def __init__(self, steps: Sequence[PipelineStep], find: nodes.Find, *, has_rows: bool) -> None:
        """`has_rows`: the first dimension of all tensors is the batch. Raises LoadFailed."""
        self._nodes = [_node(step, find, has_rows=has_rows) for step in steps]  # `check` puts them into an order
        self.makes: frozenset[str] = frozenset().union(*(node.makes for node in self._nodes))
        self.needs: frozenset[str] = frozenset().union(*(node.needs for node in self._nodes)) - self.makes
        self._plans: dict[frozenset[str], list[nodes.PlannedNode]] = {}

    def check(self, given: nodes.Specs) -> nodes.Specs:
        """Returns the tensors that the nodes make. Raises LoadFailed for one that is made twice, or by no node."""
        specs, made = dict(given), nodes.Specs()
        waiting, self._nodes = self._nodes, []
        while waiting:
            ready = [node for node in waiting if node.needs <= specs.keys()]
            if not ready:
                lacks = sorted(frozenset().union(*(node.needs for node in waiting)) - specs.keys())
                raise LoadFailed(f"tensor {lacks[0]!r} is made by no step, or by steps in a circle; see input maps")
            for node in ready:
                waiting.remove(node)
                self._nodes.append(node)
                for name, spec in node.check(specs).items():
                    if name in specs:
                        raise LoadFailed(f"tensor {name!r} is made twice; give outputs different names")
                    specs[name] = made[name] = spec
        return made

    async def run(self, tensors: nodes.Tensors, call: nodes.PipelineCall, wanted: Collection[str]) -> None:
        """Runs the nodes that make these tensors, and adds all that is made. If a node fails, the rest is cancelled."""
        names = frozenset(wanted)
        waiting = self._plans.get(names)
        if waiting is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            waiting = self._plans[names] = with_chains(self._needed(names), names)
        running: set[asyncio.Task[nodes.Tensors]] = set()
        try:
            while waiting or running:
                there = tensors.keys() | call.absent
                ready = [node for node in waiting if node.needs <= there]
                waiting = [node for node in waiting if node not in ready]
                if len(ready) == 1 and not running:
                    tensors |= await ready[0].run(tensors, call)
                    continue
                running |= {asyncio.create_task(node.run(tensors, call)) for node in ready}
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    tensors |= task.result()
        finally:
            for task in running:
                task.cancel()

    def _needed(self, wanted: Collection[str]) -> list[nodes.PipelineNode]:
        names, found = set(wanted), list[nodes.PipelineNode]()
        for node in reversed(self._nodes):
            if not node.makes.isdisjoint(names):
                found.append(node)
                names |= node.needs
        return found[::-1]


class SwitchNode:
    """A PipelineNode. Rows for which an expression is true go to one graph, the others to another: both are joined."""

    def __init__(self, step: PipelineStep, find: nodes.Find, *, has_rows: bool) -> None:
        """Raises LoadFailed."""
        self._text, self._has_rows = step.switch, has_rows
        self._branches = [Graph(steps, find, has_rows=has_rows) for steps in (step.then, step.otherwise)]
        one, other = self._branches
        self._names = sorted(names_in(step.switch))
        if not self._names:
            raise LoadFailed(f"switch {step.switch[:100]!r}: the expression names no tensor")
        self.needs = one.needs | other.needs | frozenset(self._names)
        self.makes = one.makes & other.makes
        self._expression: Expression | None = None

    def check(self, given: nodes.Specs) -> nodes.Specs:
        if not self.makes:
            raise LoadFailed(f"switch {self._text[:100]!r}: then and else must make a tensor of the same name")
        self._expression = Expression(self._text, given, has_rows=self._has_rows)
        for name in self._names:
            nodes.required(given, name)
        one, other = (branch.check(given) for branch in self._branches)
        for name in self.makes:
            nodes.check_alike(f"tensor {name!r} of else", other[name], one[name])
        return {name: _either(one[name], other[name]) for name in self.makes}

    async def run(self, tensors: nodes.Tensors, call: nodes.PipelineCall) -> nodes.Tensors:
        assert self._expression is not None
        columns = [values(tensors[name], has_rows=self._has_rows) for name in self._names]
        rows = [dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)]
        chosen = [self._expression.holds(row) for row in rows]
        if len(set(chosen)) > 1:
            return await self._both(chosen, tensors, call)
        made = dict(tensors)
        await self._branches[0 if chosen[0] else 1].run(made, call, self.makes)
        return {name: made[name] for name in self.makes}

    async def _both(self, chosen: list[bool], tensors: nodes.Tensors, call: nodes.PipelineCall) -> nodes.Tensors:
        """Divides the rows among the branches."""
        if call.emit is not None:
            raise RequestRejected("rows of a stream must take the same branch of a switch; send one row a request")
        places = [[place for place, holds in enumerate(chosen) if holds is wanted] for wanted in (True, False)]
        parts = [
            {name: chosen_rows(tensors[name], rows) for name in branch.needs if name in tensors}
            for branch, rows in zip(self._branches, places, strict=True)
        ]
        works = [branch.run(part, call, self.makes) for branch, part in zip(self._branches, parts, strict=True)]
        await _together(works)
        return {
            name: scattered(name, [(rows, part[name]) for rows, part in zip(places, parts, strict=True)])
            for name in self.makes
        }


async def _together(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs all at the same time. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _node(step: PipelineStep, find: nodes.Find, *, has_rows: bool) -> nodes.PipelineNode:
    match step.kind:
        case "switch":
            return SwitchNode(step, find, has_rows=has_rows)
        case "split" | "merge":
            return nodes.ColumnsNode(step)
    return nodes.ModelNode(step, find)


def _either(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    """What is known of a tensor that is one of two."""
    shape = tuple(a if a == b else -1 for a, b in zip(one.shape, other.shape, strict=True))
    return TensorSpec(one.name, one.datatype, shape)
