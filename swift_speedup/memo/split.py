"""Batch <-> samples: which rows of a call's inputs and outputs belong to which image or video."""
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

GRID_NAMES = ('grid_thw', 'grid_thws', 'grid_hw', 'grid_hws')


class NotSplittable(Exception):
    """The call cannot be taken apart into samples; the text says why."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with its arguments named by ``signature``; remembers which were positional, so that it can be repeated."""

    signature: inspect.Signature  # without ``self``
    args: tuple
    kwargs: dict

    @property
    def values(self) -> dict[str, Any]:
        """Argument name -> value, only for those that were passed."""
        return {**dict(zip(self._positional(), self.args)), **self.kwargs}

    def replaced(self, values: dict[str, Any]) -> tuple[tuple, dict]:
        """``(args, kwargs)`` of the same call with some arguments replaced."""
        args = tuple(values.get(name, value) for name, value in zip(self._positional(), self.args))
        return args, {name: values.get(name, value) for name, value in self.kwargs.items()}

    def _positional(self) -> list[str]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in self.signature.parameters.items() if parameter.kind in kinds]
        if len(self.args) > len(names):
            raise NotSplittable(f'{len(self.args)} positional arguments, but only {len(names)} have names')
        return names


@dataclasses.dataclass(frozen=True)
class PackedGrid:
    """The packed-patches convention: ``patches (sum of t*h*w, C)`` and ``grid (n, 3)``, one grid row per image or video.

    Every output leaf has ``rows_in / k`` rows per sample for one whole number ``k`` (``spatial_merge_size ** 2`` after the merger).
    Seen in Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V as shipped with transformers 5.19.
    """

    call: Call
    patches_name: str
    grid_name: str
    rows: tuple[int, ...]  # patches of each sample

    @classmethod
    def of(cls, call: Call) -> 'PackedGrid':
        """Raises ``NotSplittable`` when the call does not have this form."""
        tensors = {name: value for name, value in call.values.items() if isinstance(value, torch.Tensor)}
        grids = [name for name in tensors if name in GRID_NAMES]
        if len(grids) != 1:
            raise NotSplittable(f'no single grid argument ({", ".join(GRID_NAMES)}) among {sorted(call.values)}')
        grid_name = grids[0]
        patches = [name for name in tensors if name != grid_name]
        if len(patches) != 1:
            raise NotSplittable(f'other tensor arguments beside patches and {grid_name}: {sorted(patches)}')
        grid = tensors[grid_name]
        if grid.dim() != 2 or grid.is_floating_point():
            raise NotSplittable(f'{grid_name} of shape {tuple(grid.shape)} and dtype {grid.dtype}; expected integers (n, 3)')
        rows = tuple(grid.prod(-1).tolist())
        found = tensors[patches[0]].shape[0] if tensors[patches[0]].dim() else None
        if not rows or sum(rows) != found:
            raise NotSplittable(f'{patches[0]} has {found} rows, {grid_name} stands for {sum(rows)}')
        return cls(call, patches[0], grid_name, rows)

    @property
    def context(self) -> dict[str, Any]:
        """Arguments that all samples share."""
        return {name: value for name, value in self.call.values.items() if name not in (self.patches_name, self.grid_name)}

    def samples(self) -> list[dict[str, torch.Tensor]]:
        """Per sample, the input tensors that belong to it."""
        patches = self.call.values[self.patches_name].split(self.rows)
        grids = self.call.values[self.grid_name].split(1)
        return [{self.patches_name: rows, self.grid_name: grid} for rows, grid in zip(patches, grids)]

    def subset(self, indices: Sequence[int]) -> tuple[tuple, dict]:
        """Arguments of the same call for some of the samples only, packed together in the order given."""
        if list(indices) == list(range(len(self.rows))):
            return self.call.args, self.call.kwargs
        samples = self.samples()
        return self.call.replaced({
            name: torch.cat([samples[index][name] for index in indices]) for name in (self.patches_name, self.grid_name)})

    def split_leaf(self, leaf: torch.Tensor, indices: Sequence[int]) -> list[torch.Tensor]:
        """Cut an output leaf of ``subset(indices)`` into the parts of those samples (views)."""
        rows = [self.rows[index] for index in indices]
        if leaf.dim() == 0 or leaf.shape[0] == 0 or sum(rows) % leaf.shape[0]:
            raise NotSplittable(f'an output of shape {tuple(leaf.shape)} does not follow the {sum(rows)} input rows')
        merge = sum(rows) // leaf.shape[0]
        if any(count % merge for count in rows):
            raise NotSplittable(f'{merge} input rows make an output row, but samples have {rows} rows')
        return list(leaf.split([count // merge for count in rows]))
