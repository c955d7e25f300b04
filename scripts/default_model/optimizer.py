"""Muon for the hidden matrices, AdamW for embeddings and norms, both with a schedule's factor given at each step.

``torch.optim.Muon`` iterates in bfloat16, which a CPU without AVX-512 emulates; this one stays in fp32 and takes all
matrices of one shape in one batched product.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration (Jordan et al., 2024)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly, of ``g`` with shape ``[n, rows, cols]``."""
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised (Jordan et al., 2024), with decoupled weight decay."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.velocity = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        lr = self.lr * factor
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp_(velocity, self.momentum))
            rows, cols = group[0].shape
            scale = max(1.0, rows / cols) ** 0.5
            for parameter, delta in zip(group, update, strict=True):
                parameter.mul_(1 - lr * self.decay).sub_(delta, alpha=lr * scale)

    def state(self) -> dict[str, Tensor]:
        return {f"muon.{i}": velocity for i, velocity in enumerate(self.velocity)}

    def load(self, state: dict[str, Tensor]) -> None:
        for i, velocity in enumerate(self.velocity):
            velocity.copy_(state[f"muon.{i}"])


class AdamW:
    """Adam without weight decay: embeddings and norms take none."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.98)
    ) -> None:
        self.parameters, self.lr, self.betas, self.steps = parameters, lr, betas, 0
        self.mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.square = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        self.steps += 1
        first, second = self.betas
        rate = self.lr * factor / (1 - first**self.steps)
        for name, parameter in self.parameters.items():
            mean, square = self.mean[name], self.square[name]
            mean.lerp_(parameter.grad, 1 - first)
            square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            scale = (square / (1 - second**self.steps)).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, scale, value=-rate)

    def state(self) -> dict[str, Tensor]:
        state = {f"adam.mean.{name}": mean for name, mean in self.mean.items()}
        return state | {f"adam.square.{name}": square for name, square in self.square.items()}

    def load(self, state: dict[str, Tensor], steps: int) -> None:
        self.steps = steps
        for name in self.parameters:
            self.mean[name].copy_(state[f"adam.mean.{name}"])
            self.square[name].copy_(state[f"adam.square.{name}"])
