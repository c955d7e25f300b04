"""Steps of a pipeline in a row whose models may run as one batch, so that tensors stay in their process."""

from collections.abc import Collection, Sequence

from penstock.messages.tensors import MemberModel
from penstock.repository.backend.wire import RunNext
from penstock.repository.chains import NextStep
from penstock.repository.oneshot import OneShotModel
from penstock.repository.pipelines.nodes import ModelNode, PipelineCall, PipelineNode, PlannedNode, Tensors


class ChainNode:
    """A PlannedNode: models, each of which takes only what the one before makes, which goes nowhere else."""

    def __init__(self, nodes: Sequence[ModelNode]) -> None:
        self._nodes = nodes
        self.needs, self.makes = nodes[0].needs, nodes[-1].makes
        self._models: list[MemberModel | None] = []
        self._then: list[tuple[NextStep, ...]] = []  # by node, those that may run at once after it

    async def run(self, tensors: Tensors, call: PipelineCall) -> Tensors:
        at, made = 0, tensors
        while at < len(self._nodes):
            models = [node.found() for node in self._nodes]  # others may have been loaded meanwhile
            if models != self._models:
                self._models, self._then = models, _followers(self._nodes, models)
            if (model := models[at]) is not None and (then := self._then[at]):
                made, ran = await self._nodes[at].run_with(model, then, self._nodes[at + 1 :], made, call)
                at += ran
            else:
                made = await self._nodes[at].run(made, call)
            at += 1
        return made


def with_chains(nodes: Sequence[PipelineNode], wanted: Collection[str]) -> list[PlannedNode]:
    """Returns nodes that do the same: some of them are chains. `nodes` are in an order in which they can run."""
    left, found = list(nodes), list[PlannedNode]()
    while left:
        chain = [left.pop(0)]
        while (node := _only_user(chain[-1], nodes, wanted)) is not None:
            left.remove(node)
            chain.append(node)
        models = [node for node in chain if isinstance(node, ModelNode)]
        found.append(ChainNode(models) if len(models) > 1 else chain[0])
    return found


def _only_user(node: PipelineNode, nodes: Sequence[PipelineNode], wanted: Collection[str]) -> ModelNode | None:
    """The model that takes what `node` makes and nothing else, if nothing else takes it."""
    users = [each for each in nodes if not each.needs.isdisjoint(node.makes)]
    if not isinstance(node, ModelNode) or len(users) != 1 or not node.makes.isdisjoint(wanted):
        return None
    user = users[0]
    return user if isinstance(user, ModelNode) and user.needs <= node.makes else None


def _followers(nodes: Sequence[ModelNode], models: Sequence[MemberModel | None]) -> list[tuple[NextStep, ...]]:
    steps = [_next_step(*pair) for pair in zip(nodes, models, nodes[1:], models[1:], strict=False)]
    found: list[tuple[NextStep, ...]] = [()]
    for step in reversed(steps):
        found.append(() if step is None else (step, *found[-1]))
    return found[::-1]


def _next_step(
    before: ModelNode, giver: MemberModel | None, node: ModelNode, taker: MemberModel | None
) -> NextStep | None:
    """The step from one model to the next, if they share a process and their tensors need no check but this one."""
    if not isinstance(giver, OneShotModel) or not isinstance(taker, OneShotModel):
        return None
    one, other = giver.batches, taker.batches
    if one is None or other is None or not one.may_precede(other):
        return None
    given = {before.outputs[spec.name]: spec for spec in giver.outputs if spec.name in before.outputs}
    inputs = []
    for spec in taker.inputs:
        if spec.name not in node.inputs:
            continue
        there = given[node.inputs[spec.name]]
        shape = there.shape[1:]
        if (there.datatype, shape) != (spec.datatype, spec.shape[1:]) or -1 in shape or spec.datatype == "BYTES":
            return None
        inputs.append((spec.name, there.name, shape))
    return NextStep(other, RunNext(other.model, tuple(inputs), tuple(node.outputs)))
