"""A sampler with its own batch, for tests: add rows, then pass logits for some of them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.batch_arrays import CHOSEN
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import Session
from penstock.messages import SamplingParams, row_size
from penstock.runtime.in_flight import STATUS_ERRORS
from penstock.runtime.native_step import NativeStep
from penstock.runtime.sampling.sampler import Sampler as Rows
from penstock.runtime.step_kernels import ReferenceStep, StepKernels

HERE = torch.device("cpu")
MOST_TOKENS = 50_000


def sets_with_samplers() -> tuple[str, ...]:
    """The instruction sets under test: the best one, and AVX2. All others have the sampler of AVX512 (isa/*.cpp)."""
    found = instruction_sets()
    return tuple(each for each in found if each in (found[0], "avx2"))


class Sampled(NamedTuple):
    """The results of the rows of logits, in their order."""

    token_ids: list[int]
    logprobs: list[bytes]  # one packed row each; empty where not asked for
    errors: dict[int, str]  # by place among the rows


class Sampler:
    """Chooses the next token of each row and appends it to the row's outputs."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        session: Session | None = None,
        *,
        kernels: StepKernels | None = None,
        device: torch.device = HERE,
    ) -> None:
        """Uses the session's native kernels, or `kernels`, or the reference."""
        self.kernels = kernels or (NativeStep(session, ()) if session else ReferenceStep())
        self._device = device
        self.rows = Rows(vocab_size, max_rows, device, shared=device == HERE)
        self.token_ids = torch.zeros(max_rows, MOST_TOKENS, dtype=torch.int32, device=device)
        self._outputs = np.zeros(max_rows, np.int64)
        self._prompts = np.zeros(max_rows, np.int64)

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        self.rows.add(row, params, choice, prompt_ids, output_ids)
        tokens = [*prompt_ids, *output_ids]
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._prompts[row], self._outputs[row] = len(prompt_ids), len(output_ids)

    def remove(self, row: int) -> None:
        self.rows.remove(row)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int] | NDArray[np.int64],
        masks: Mapping[int, NDArray[np.bool_]] = MappingProxyType({}),
    ) -> Sampled:
        """Returns the next token of each of the distinct `rows`. `logits`: float32 [rows, vocab]. `masks` [vocab], by
        place among the rows, say which tokens are allowed."""
        which = np.asarray(rows, np.int64)
        asked = self.rows.plan(which, self._outputs[which])
        for change in self.rows.changes():
            change.write([torch.from_numpy(np.ascontiguousarray(a)).to(self._device) for a in change.arrays])
        for line, (place, allowed) in enumerate(masks.items()):
            bits = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view(np.int32)
            self.rows.masks.words[line] = torch.from_numpy(bits)
            self.rows.masks.lines[place] = line
        lines = torch.zeros(3, len(which), dtype=torch.int32)
        lines[0] = torch.from_numpy(which)
        chosen = self.kernels.choose(
            logits.contiguous().to(self._device),
            lines.to(self._device),
            self.rows.rows,
            self.rows.edits,
            self.token_ids,
            edited=torch.from_numpy(asked.edited).to(self._device) if len(asked.edited) else None,
            filtered=asked.filtered,
            logprobs=asked.most_logprobs,
            masks=self.rows.masks if masks else None,
        )
        self.rows.masks.lines.fill_(-1)
        tokens, status = chosen.tokens.tolist(), chosen.status.tolist()
        packed = [b""] * len(tokens)
        for i, k in enumerate(asked.logprobs.tolist()):
            if k >= 0 and status[i] == CHOSEN and chosen.packed is not None:
                packed[i] = chosen.packed[i, : row_size(k) // 4].cpu().numpy().tobytes()
        taken = chosen.status.cpu().numpy() == CHOSEN
        good = which[taken]
        at = torch.from_numpy(good).to(self._device), torch.from_numpy(self._prompts[good] + self._outputs[good])
        self.token_ids[at[0], at[1].to(self._device)] = chosen.tokens[torch.from_numpy(taken)].int()
        self.rows.rows.outputs[at[0]] += 1
        self._outputs[good] += 1
        return Sampled(tokens, packed, {i: STATUS_ERRORS[s] for i, s in enumerate(status) if s != CHOSEN})
