"""How a model is divided among ranks, and which part each rank has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The layers are divided among `pipeline` stages, and each layer among the `tensor` ranks of its stage. With
    `expert`, a rank holds some experts whole instead of a part of each. Raises ValueError for sizes below 1."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}_parallel_size={getattr(self, name)} is no number of ranks: use 1 or more")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def places(self) -> "tuple[RankPlace, ...]":
        """The place of every rank, in rank order."""
        return tuple(RankPlace(self, rank) for rank in range(self.world))

    def __str__(self) -> str:
        """For people: 'TP=2 x PP=2', 'EP=2' (of whole experts; the rest is tensor parallel), 'one rank'."""
        sizes = ("EP" if self.expert else "TP", self.tensor), ("PP", self.pipeline)
        return " x ".join(f"{name}={size}" for name, size in sizes if size > 1) or "one rank"


@dataclass(frozen=True)
class RankPlace:
    """One rank of a split: `rank = stage * tensor + tensor_rank`. Raises ValueError if the split has no such rank."""

    split: Split = Split()
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.split.world:
            raise ValueError(f"there is no rank {self.rank} among {self.split.world}: use 0 to {self.split.world - 1}")

    @property
    def stage(self) -> int:
        return self.rank // self.split.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.split.tensor

    @property
    def first(self) -> bool:
        """Whether this rank's stage begins with the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this rank's stage ends with the head."""
        return self.stage == self.split.pipeline - 1

    @property
    def reports(self) -> bool:
        """Whether this rank has the whole logits, samples, and reports the result."""
        return self.last and self.tensor_rank == 0


def part(total: int, parts: int, index: int) -> range:
    """The `index`-th of `parts` consecutive ranges of range(total). Their lengths differ by at most 1; longer ones come
    first."""
    size, more = divmod(total, parts)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))
