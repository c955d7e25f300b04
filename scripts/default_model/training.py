"""The training loop. It is driven by active time and can be told to finish at any moment."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .lines import Lines
from .loops import LoopBreaker
from .network import Network, Shape, doubled, layer_before_growth
from .optimizer import AdamW, Muon

LONGEST_STEP_S = 30.0  # a longer step was suspended; its excess time does not count as training
STEP_TOKENS = 2048  # more do not fit in a CPU's caches, and many small steps learn faster
# Shares of the run's time, from its start. A shallow network learns faster at first. Short windows are cheaper; the
# long ones at the end train the far positions.
GROWTH_AT = 0.65  # until here the network has half of its layers
ENDINGS_AT = 0.6  # from here on, the ends of functions count more: without this, greedy decoding seldom ends
ENDING_WEIGHT = 3.0
LOOPS_AT = 0.75  # from here on, repetitions in the model's own completions count as well,
LOOPS_EVERY = 4  # in every fourth step
LENGTHS = ((0.5, 512), (0.85, 1024), (1.01, 2048))
DECAY_SHARE = 0.45  # share of the time, at the end of the run


@dataclass
class Schedule:
    """Learning-rate factor over active seconds: warm-up, stable, then linear decay to zero at ``end_s``."""

    end_s: float
    warmup_s: float = 60.0
    decay_share: float = DECAY_SHARE
    decay_start_s: float = field(init=False)
    decay_from: float = 1.0

    def __post_init__(self) -> None:
        self.decay_start_s = self.end_s * (1 - self.decay_share)

    def factor(self, elapsed_s: float) -> float:
        warm = min(1.0, 0.05 + elapsed_s / self.warmup_s)
        if elapsed_s < self.decay_start_s:
            return warm
        left = (self.end_s - elapsed_s) / (self.end_s - self.decay_start_s)
        return warm * self.decay_from * max(0.0, left)

    def finish_within(self, elapsed_s: float, seconds: float) -> None:
        """Decay from the present factor to zero within ``seconds``."""
        self.decay_from = self.factor(elapsed_s)
        self.decay_start_s, self.end_s = elapsed_s, elapsed_s + seconds


def window_length(progress: float) -> int:
    return next(length for until, length in LENGTHS if progress < until)


def windows(documents: list[Tensor], length: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield windows of ``length + 1`` tokens for ever: each pass shuffles the documents and cuts them anew."""
    while True:
        stream = torch.cat(rng.sample(documents, len(documents)))
        starts = list(range(rng.randrange(length), len(stream) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            yield stream[start : start + length + 1]


def example(window: Tensor, lines: Lines, ending_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and the targets' weights, each one token shorter than ``window``."""
    window = window.long()
    weights = torch.ones(len(window))
    weights[lines.endings(window.tolist())] = ending_weight
    return window[:-1], window[1:], weights[1:]


class Run:
    """One training run: network, optimisers, and the counts that a checkpoint keeps."""

    def __init__(self, shape: Shape, *, muon_lr: float, adam_lr: float) -> None:
        self.shape, self.muon_lr, self.adam_lr = shape, muon_lr, adam_lr
        self._attach(Network(replace(shape, layers=shape.layers // 2)))
        self.elapsed_s = 0.0
        self.step = 0
        self.tokens = 0
        self.loss = float("nan")

    def _attach(self, network: Network) -> None:
        self.network = network
        named = dict(network.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and "embed_tokens" not in name]
        others = {name: p for name, p in named.items() if p.ndim != 2 or "embed_tokens" in name}
        self.muon = Muon(matrices, self.muon_lr)
        self.adam = AdamW(others, self.adam_lr)

    @property
    def is_full_depth(self) -> bool:
        return self.network.shape.layers == self.shape.layers

    def train_step(
        self, ids: Tensor, targets: Tensor, weights: Tensor, factor: float, breaker: LoopBreaker | None
    ) -> float:
        """Take one step on ``[batch, length]`` tokens, targets and weights; return the loss in nats per token."""
        loss = self.network.loss(ids, targets, weights)
        loss.backward()
        if breaker:
            breaker.loss(self.network).backward()
        torch.nn.utils.clip_grad_norm_(self.adam.parameters.values(), 1.0)
        self.muon.step(factor)
        self.adam.step(factor)
        for parameter in self.network.parameters():
            parameter.grad = None
        return loss.item()

    def grow(self) -> None:
        """Double the network's depth. Adam's state goes along; Muon's momentum starts anew."""
        network = doubled(self.network)
        old = self.adam
        self._attach(network)
        self.adam.steps = old.steps
        for name in self.adam.parameters:
            self.adam.mean[name].copy_(old.mean[layer_before_growth(name)])
            self.adam.square[name].copy_(old.square[layer_before_growth(name)])

    def save(self, file: Path) -> None:
        counts = {
            "elapsed_s": self.elapsed_s,
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.loss,
            "layers": self.network.shape.layers,
        }
        tensors = {**self.network.state_dict(), **self.muon.state(), **self.adam.state()}
        partial = file.with_suffix(".partial")
        save_file(tensors, str(partial), metadata={"counts": json.dumps(counts)})
        partial.replace(file)

    def restore(self, file: Path) -> None:
        with safe_open(str(file), "pt") as checkpoint:
            state = {name: checkpoint.get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118
            counts = json.loads(checkpoint.metadata()["counts"])
        self._attach(Network(replace(self.shape, layers=counts["layers"])))
        self.network.load_state_dict({name: state[name] for name in self.network.state_dict()})
        self.elapsed_s, self.step, self.tokens = counts["elapsed_s"], counts["step"], counts["tokens"]
        self.loss = counts["loss"]
        self.muon.load(state)
        self.adam.load(state, self.step)

    def count(self, loss: float, seconds: float) -> None:
        """Add one step; the loss is kept as a moving average over about 50 steps."""
        self.loss = loss if self.step == 0 else 0.98 * self.loss + 0.02 * loss
        self.elapsed_s += seconds
        self.step += 1
        self.tokens += STEP_TOKENS


def train(
    run: Run,
    documents: list[Tensor],
    lines: Lines,
    *,
    minutes: float,
    checkpoint: Path,
    finish_file: Path | None,
    seed: int,
) -> None:
    """Train for ``minutes`` of active time; a checkpoint every four minutes and at the end.

    ``documents`` are token ids, one tensor a file.

    When ``finish_file`` appears, the run decays at once and ends within the minutes written in it.
    """
    schedule = Schedule(minutes * 60)
    rng = random.Random(seed + run.step)
    breaker = LoopBreaker(documents, lines, rng)
    length, source = 0, iter(())
    saved_s = run.elapsed_s
    window_tokens, window_s = 0, 0.0
    while run.elapsed_s < schedule.end_s:
        if finish_file is not None and finish_file.exists():
            schedule.finish_within(run.elapsed_s, 60 * float(finish_file.read_text()))
            finish_file.unlink()
        started = time.monotonic()
        progress = run.elapsed_s / schedule.end_s
        if progress >= GROWTH_AT and not run.is_full_depth:
            run.grow()
        if length != window_length(progress):
            length = window_length(progress)
            source = windows(documents, length, rng)
        batch = [next(source) for _ in range(STEP_TOKENS // length)]
        ending_weight = ENDING_WEIGHT if progress >= ENDINGS_AT else 1.0
        examples = [example(window, lines, ending_weight) for window in batch]
        ids, targets, weights = (torch.stack(column) for column in zip(*examples, strict=True))
        factor = schedule.factor(run.elapsed_s)
        breaks_loops = progress >= LOOPS_AT and run.step % LOOPS_EVERY == 0
        loss = run.train_step(ids, targets, weights, factor, breaker if breaks_loops else None)
        spent = min(time.monotonic() - started, LONGEST_STEP_S)
        run.count(loss, spent)
        window_tokens, window_s = window_tokens + STEP_TOKENS, window_s + spent
        if run.step % 20 == 0:
            eta = (schedule.end_s - run.elapsed_s) / 60
            print(
                f"{time.strftime('%H:%M:%S')} step {run.step:5d} loss {loss:.3f} mean {run.loss:.3f} lr x{factor:.2f} "
                f"length {length} repeated {breaker.share:.2f} "
                f"tokens {run.tokens / 1e6:.2f}M {window_tokens / window_s:.0f}/s left {eta:.1f} min",
                flush=True,
            )
            window_tokens, window_s = 0, 0.0
        if run.elapsed_s - saved_s > 240:
            run.save(checkpoint)
            saved_s = run.elapsed_s
    run.save(checkpoint)
