"""Mixtures of experts: the choice of experts, and that a token's result is its own, with weights of every scheme.

They run with the best instruction set of this processor; test_emulated.py runs them with the others.
"""

from ctypes import c_int64

import pytest
import torch
from torch import Tensor

from penstock.kernels import Experts, Routing, SharedExpertOutput
from penstock.kernels.linear import TorchLinear
from penstock.kernels.moe import TorchExperts
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packing import PackedWeight
from penstock.kernels.native.session import Session, native_session
from penstock.kernels.native.structs import ExpertsOp
from penstock.kernels.native.team import ThreadTeam
from tests.kernels.native.reference import FROM_FLOATS, GROUPED, random_weight

SCHEMES = tuple(FROM_FLOATS)
DRAWN = ("Q2_K", "Q6_K", "IQ4_XS", "MXFP4", "Q4_0", "Q4_0+Q4_K")  # with random codes and scales
COUNT, HIDDEN, WIDTH, SLOTS, TOKENS = 6, 104, 72, 3, 140  # more tokens than are multiplied at once


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def native() -> NativeExperts:
    return NativeExperts(native_session())


@pytest.fixture(params=["torch", "native"])
def experts(request: pytest.FixtureRequest) -> Experts:
    return native() if request.param == "native" else TorchExperts(TorchLinear())


def packed_as(scheme: str, weight: Tensor, *, gated: bool, count: int = 1) -> PackedWeight:
    """The weight packed in a format, or a random one of its size."""
    if scheme in FROM_FLOATS:
        return pack(weight, None, FROM_FLOATS[scheme], gated=gated, count=count)
    n, k = weight.shape
    return random_weight(GROUPED[scheme], n // count, k, gated=gated, count=count)


class Mixture:
    """Weights of one scheme, and tokens with their routing."""

    def __init__(self, scheme: str, tokens: int = TOKENS, total: int = COUNT) -> None:
        self.dtype = torch.float32 if scheme == "f32" else torch.bfloat16
        dense = drawn(COUNT * 2 * WIDTH, HIDDEN) / HIDDEN**0.5, drawn(COUNT * HIDDEN, WIDTH) / WIDTH**0.5
        self.dense = tuple(weight.to(self.dtype) for weight in dense)
        self.weights = tuple(
            packed_as(scheme, weight, gated=gated, count=COUNT)
            for weight, gated in zip(self.dense, (True, False), strict=True)
        )
        self.x, self.residual = (drawn(tokens, HIDDEN + i, dtype=self.dtype)[:, :HIDDEN].contiguous() for i in (0, 1))
        self.shared = SharedExpertOutput(
            drawn(tokens, HIDDEN + 2, dtype=self.dtype)[:, :HIDDEN].contiguous(), drawn(tokens, 1)
        )
        self.routing = native().route(drawn(tokens, total), SLOTS, normalize=True)

    def run(self, experts: NativeExperts, rows: Tensor | slice = slice(None), first: int = 0) -> Tensor:
        x, residual, ids, weights, shared, gate = (
            tensor[rows].contiguous() for tensor in (self.x, self.residual, *self.routing, *self.shared)
        )
        routing = Routing(ids, weights)
        return experts(
            x, routing, *self.weights, "silu", first=first, shared=SharedExpertOutput(shared, gate), residual=residual
        )


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_routers_logits_are_not_rounded_to_bf16(rows: int) -> None:
    """Rounding would choose between experts that are nearly as good."""
    linear = TorchLinear()
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (rows, 8))
    logits = linear.logits(x, linear.pack(weight))
    torch.testing.assert_close(logits, (x.double() @ weight.double().T).float(), rtol=0.0, atol=1e-4)


def test_of_equal_logits_the_first_experts_are_chosen(experts: Experts) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 3.0], [0.0] * 6, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    assert experts.route(logits, 4, normalize=False).experts.tolist() == [[1, 2, 5, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_weights_are_the_softmax_over_all_experts_or_over_the_chosen(experts: Experts) -> None:
    logits = drawn(50, 33) * 4
    for slots in (1, 5, 33):
        whole, chosen = (experts.route(logits, slots, normalize=normalize) for normalize in (False, True))
        expected = torch.softmax(logits.double(), -1).gather(1, whole.experts)
        torch.testing.assert_close(whole.weights.double(), expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(
            chosen.weights.double(), expected / expected.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7
        )


def test_a_row_of_logits_that_are_not_finite_chooses_some_experts_and_spoils_itself_alone(experts: Experts) -> None:
    logits = drawn(5, 20)
    clean = experts.route(logits, 4, normalize=True)
    logits[1, 7], logits[2, 0], logits[3] = torch.nan, torch.inf, torch.nan
    spoiled = experts.route(logits, 4, normalize=True)
    assert spoiled.weights[1:4].isnan().any(-1).all()
    assert ((spoiled.experts >= 0) & (spoiled.experts < 20)).all()
    assert all(len(set(row)) == 4 for row in spoiled.experts.tolist())
    for row in (0, 4):
        assert torch.equal(spoiled.experts[row], clean.experts[row])
        assert torch.equal(spoiled.weights[row], clean.weights[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_the_formula(experts: Experts, dtype: torch.dtype) -> None:
    mixture = Mixture("f32" if dtype == torch.float32 else "bf16")
    gate_up, down = (weight.double() for weight in mixture.dense)
    x, want = mixture.x.double(), mixture.residual.double()
    assert mixture.shared.gate is not None
    want = want + mixture.shared.output.double() * torch.sigmoid(mixture.shared.gate.double())
    for token in range(TOKENS):
        for expert, weight in zip(mixture.routing.experts[token], mixture.routing.weights[token], strict=True):
            gate, up = (gate_up.view(COUNT, 2, WIDTH, HIDDEN)[expert] @ x[token]).unbind()
            inner = torch.nn.functional.silu(gate) * up
            want[token] += weight.double() * (down.view(COUNT, HIDDEN, WIDTH)[expert] @ inner)
    packed = (
        experts.pack(weight, COUNT, gated=gated) for weight, gated in zip(mixture.dense, (True, False), strict=True)
    )
    got = experts(mixture.x, mixture.routing, *packed, "silu", shared=mixture.shared, residual=mixture.residual)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), want, rtol=0.0, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_give_what_products_with_each_expert_give(scheme: str) -> None:
    """Rows of an expert multiply as they would alone, so only roundings between products differ."""
    mixture = Mixture(scheme)

    class Packed(NativeLinear):
        def pack(
            self, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, gated: bool = False
        ) -> PackedWeight:
            assert isinstance(weight, Tensor)
            return pack(weight, bias, FROM_FLOATS[scheme], gated=gated)

    one_by_one = TorchExperts(Packed(native_session()))
    packed = (
        one_by_one.pack(weight, COUNT, gated=gated) for weight, gated in zip(mixture.dense, (True, False), strict=True)
    )
    want = one_by_one(
        mixture.x, mixture.routing, *packed, "silu", shared=mixture.shared, residual=mixture.residual
    ).float()
    tolerance = 1e-6 if mixture.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(mixture.run(native()).float(), want, rtol=0.0, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("scheme", SCHEMES + DRAWN)
def test_a_token_is_the_same_whoever_is_beside_it_in_all_schemes(scheme: str) -> None:
    mixture = Mixture(scheme)
    team = ThreadTeam(native_session().team.isa, 2)
    of_all = []
    for experts in (native(), NativeExperts(Session(team))):
        of_all.append(mixture.run(experts))
        for rows in (1, 2, 5, 17, 90):
            for start in (0, TOKENS - rows):
                part = slice(start, start + rows)
                assert torch.equal(mixture.run(experts, part), of_all[-1][part])
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
        assert torch.equal(mixture.run(experts, order), of_all[-1][order])
    assert torch.equal(*of_all)
    team.close()


def test_a_token_that_is_not_finite_spoils_itself_alone_in_all_schemes() -> None:
    for scheme in SCHEMES:
        mixture = Mixture(scheme, tokens=20)
        clean = mixture.run(native())
        mixture.x[3, 5], mixture.x[11, 100] = torch.inf, torch.nan
        spoiled = mixture.run(native())
        assert (~spoiled[[3, 11]].isfinite()).any(-1).all()
        others = [token for token in range(20) if token not in (3, 11)]
        assert torch.equal(spoiled[others], clean[others])


def test_experts_held_elsewhere_give_nothing(experts: Experts) -> None:
    """Two ranks with half of the experts each sum to the whole; a rank without a token's experts gives 0."""
    mixture = Mixture("f32")
    halves = []
    for first in (0, COUNT // 2):
        packed = (
            experts.pack(weight.chunk(2)[first and 1], COUNT // 2, gated=gated)
            for weight, gated in zip(mixture.dense, (True, False), strict=True)
        )
        halves.append(experts(mixture.x, mixture.routing, *packed, "silu", first=first))
    packed = (
        experts.pack(weight, COUNT, gated=gated) for weight, gated in zip(mixture.dense, (True, False), strict=True)
    )
    whole = experts(mixture.x, mixture.routing, *packed, "silu")
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)
    elsewhere = (mixture.routing.experts >= COUNT // 2).all(-1)
    assert elsewhere.any() and not halves[0][elsewhere].any()


def test_only_the_experts_that_were_chosen_are_read() -> None:
    """The weights of unused experts may be NaN, and the op counts the matrices that it read."""
    mixture = Mixture("bf16", tokens=9)
    mixture.routing.experts.copy_(torch.tensor([1, 4, 5]).expand(9, 3))
    want = mixture.run(native())
    for weight in mixture.weights:
        weight.lines.view(COUNT, -1)[[0, 2, 3]] = 0xFF  # NaN in bf16
    assert torch.equal(mixture.run(native()), want)

    class Watching(Session):
        def run(self, op: object, *keep: Tensor) -> None:  # type: ignore[override]
            super().run(op, *keep)  # type: ignore[arg-type]
            if isinstance(op, ExpertsOp):
                self.tally = keep[-1].tolist()

    session = Watching(native_session().team)
    mixture.run(NativeExperts(session))
    assert session.tally == [3, 27]
    mixture.run(NativeExperts(session), first=5)
    assert session.tally == [1, 9]


def test_a_recorded_mixture_takes_any_number_of_rows() -> None:
    session, mixture = native_session(), Mixture("bf16")
    rows = c_int64()
    with session.record() as program:
        x = program.input(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), rows)
        logits = program.input(torch.zeros(TOKENS, COUNT), rows)
        routing = NativeExperts(session).route(logits, SLOTS, normalize=True)
        out = NativeExperts(session)(x, routing, *mixture.weights, "silu")
    drawn_logits = drawn(TOKENS, COUNT)
    for count in (3, TOKENS, 1, 0, 90):
        rows.value = count
        x[:count], logits[:count] = mixture.x[:count], drawn_logits[:count]
        program.run()
        routing_now = native().route(drawn_logits[:count], SLOTS, normalize=True)
        want = native()(mixture.x[:count], routing_now, *mixture.weights, "silu")
        assert torch.equal(out[:count], want)
