"""Batch <-> samples: which rows of a tensor belong to which sample, how to take some of them, how to put outputs together again.

A *sample* is what is reused as one: an image, a crop, an audio clip, a token sequence.
"""
import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from .arguments import NotSplittable

Form = Any  # hashable: what the shape of an output depends on besides the number of rows
SIZES = ('grid_thw', 'grid_thws', 'grid_hw', 'grid_hws', 'image_grid_thw', 'video_grid_thw', 'cu_seqlens', 'cu_window_seqlens',
         'feature_lens', 'audio_feature_lengths', 'input_lengths', 'feature_lengths', 'image_sizes')  # in ``Layout.sizes`` already
Spec = tuple  # how an output leaf follows the samples; see the layouts


class Layout(abc.ABC):
    """How the samples of one call lie in its tensors. ``sizes`` measures each sample's work."""

    convention: str
    sizes: tuple[int, ...]
    rows_may_vary = True  # an output may have other rows than its sample's size tells

    def __len__(self) -> int:
        return len(self.sizes)

    def spread(self) -> tuple[int, int]:
        """The sizes of the smallest and the largest sample, where samples are padded to the largest."""
        return 0, 0

    def marks(self) -> tuple[int, ...]:
        """Of each sample, the size that must have been seen before the shape of an output is known."""
        return self.sizes

    def absent(self, name: str) -> Optional[bytes]:
        """What an argument that was passed as ``None`` stands for; ``None``: nothing special."""
        return None

    def closure(self, indices: Sequence[int]) -> list[int]:
        """The samples that are evaluated when these are: those that cannot be separated come along."""
        return list(indices)

    @abc.abstractmethod
    def pieces(self, name: str, tensor: torch.Tensor) -> Optional[list[Any]]:
        """Per sample, the part of an input that belongs to it (tensor or bytes); ``None``: it belongs to all."""

    @abc.abstractmethod
    def pick(self, name: str, tensor: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        """The input for a call with the samples ``indices`` only."""

    @abc.abstractmethod
    def form(self, name: str, tensor: torch.Tensor) -> Form:
        """Sizes of an input that do not follow from the number of its rows; ``None``: no shape depends on it."""

    def only(self, indices: Sequence[int]) -> Optional['Layout']:
        """The layout of a call with these samples; ``None`` where that would be of no use."""
        return None

    @abc.abstractmethod
    def spec(self, leaf: torch.Tensor) -> Spec:
        """How an output of the whole call follows the samples. Raises ``NotSplittable`` if it does not."""

    @abc.abstractmethod
    def shape(self, spec: Spec) -> tuple[int, ...]:
        """Of an output of the whole call."""

    @abc.abstractmethod
    def cut(self, spec: Spec, leaf: torch.Tensor, indices: Sequence[int]) -> list[torch.Tensor]:
        """Views of an output of the call with the samples ``indices``, one per sample. Raises ``NotSplittable``."""

    @abc.abstractmethod
    def join(self, spec: Spec, parts: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """``into``, filled with the output of the whole call from the parts of all samples."""

    @abc.abstractmethod
    def respec(self, spec: Spec, before: Sequence[int], after: Sequence[int]) -> Optional[Spec]:
        """The spec after a reshape of the whole output, ``None`` if rows do not stay with their samples."""

    @abc.abstractmethod
    def reshape(self, spec: Spec, leaf: torch.Tensor) -> torch.Tensor:
        """That reshape, of the output of a call with any of the samples."""

    @abc.abstractmethod
    def fixed(self, spec: Spec) -> int:
        """Operations along dimensions from this one on leave rows with their samples."""

    @abc.abstractmethod
    def retailed(self, spec: Spec, after: Sequence[int]) -> Spec:
        """The spec after such an operation."""


class Single(Layout):
    """The whole call is one sample."""

    convention = 'whole call'

    def __init__(self):
        self.sizes = (1,)

    def pieces(self, name, tensor):
        return [tensor]

    def pick(self, name, tensor, indices):
        return tensor

    def form(self, name, tensor):
        return tuple(tensor.shape)

    def spec(self, leaf):
        return tuple(leaf.shape)

    def shape(self, spec):
        return spec

    def cut(self, spec, leaf, indices):
        return [leaf]

    def join(self, spec, parts, into):
        return into.copy_(parts[0])

    def respec(self, spec, before, after):
        return tuple(after)

    def reshape(self, spec, leaf):
        return leaf.reshape(spec)

    def fixed(self, spec):
        return 0

    def retailed(self, spec, after):
        return tuple(after)


class Rows(Layout):
    """Each sample owns ``counts[i]`` consecutive rows along one dimension; with all counts 1 that is the batch dimension.

    An output has rows in the same order: a fixed fraction of the input's (merged patches, several rows per image), or what strided
    convolutions leave of each sample (audio). Output rows lie along dimension 0, or 1 when dimension 0 has size 1.

    ``boundaries`` names arguments such as ``cu_seqlens`` that hold positions between rows. ``cropped`` maps names to functions
    ``(sample, i) -> part of it that is no padding``. ``padded``: the tower pads samples to the largest.
    """

    def __init__(self, convention: str, counts: Sequence[int], axes: dict[str, int], boundaries: Sequence[str] = (),
                 crop: Optional[dict[str, Callable[[torch.Tensor, int], torch.Tensor]]] = None, padded: bool = False):
        self.convention = convention
        self.sizes = tuple(counts)
        self._axes = axes  # of inputs whose rows are not found by their number
        self._boundaries = tuple(boundaries)
        self._crop = crop or {}
        self._padded = padded or bool(crop)
        self._total = sum(counts)
        self._starts = [sum(self.sizes[:place]) for place in range(len(self.sizes))]

    def spread(self):
        return (min(self.sizes), max(self.sizes)) if self._padded else (0, 0)

    def _role(self, name: str, tensor: torch.Tensor) -> tuple[str, int]:
        if name in self._boundaries:
            return 'boundaries', 0
        if name in self._crop:
            return 'samples', 0
        if name in self._axes:
            return 'rows', self._axes[name]
        if tensor.dim() and tensor.shape[0] == self._total:
            return 'rows', 0
        if tensor.dim() and tensor.shape[0] == len(self):
            return 'samples', 0
        return 'all', 0

    def pieces(self, name, tensor):
        role, axis = self._role(name, tensor)
        if role == 'rows':
            return list(tensor.split(self.sizes, axis))
        if role == 'samples':
            parts = list(tensor.split(1))
            return [self._crop[name](part, place) for place, part in enumerate(parts)] if name in self._crop else parts
        if role == 'boundaries':
            return [_inside(tensor, start, start + size) for start, size in zip(self._starts, self.sizes)]
        return None

    def pick(self, name, tensor, indices):
        role, axis = self._role(name, tensor)
        if role == 'all':
            return tensor
        if role == 'boundaries':
            pieces, place, parts = self.pieces(name, tensor), 0, [tensor.new_zeros(1)]
            for index in indices:
                parts.append(pieces[index][1:] + place)
                place += self.sizes[index]
            return torch.cat(parts)
        parts = tensor.split(self.sizes, axis) if role == 'rows' else tensor.split(1)
        return torch.cat([parts[index] for index in indices], axis)

    def form(self, name, tensor):
        role, axis = self._role(name, tensor)
        if role == 'boundaries':
            return 'boundaries'
        if name in self._crop:
            return tuple(tensor.shape[1:2])
        return tuple(tensor.shape) if role == 'all' else (*tensor.shape[:axis], *tensor.shape[axis + 1:])

    def only(self, indices):
        return Rows(self.convention, [self.sizes[index] for index in indices], self._axes)

    def spec(self, leaf):
        if leaf.dim() == 0 or leaf.numel() == 0:
            raise NotSplittable(f'an output of shape {tuple(leaf.shape)} has no rows')
        for axis in ((0, 1) if leaf.shape[0] == 1 and leaf.dim() > 1 else (0,)):
            rule = _rule(self.sizes, leaf.shape[axis])
            if rule is not None:
                return axis, rule, tuple(leaf.shape[:axis]), tuple(leaf.shape[axis + 1:])
        raise NotSplittable(
            f'an output of shape {tuple(leaf.shape)} does not follow the {self._total} input rows of {len(self)} samples')

    def shape(self, spec):
        axis, rule, before, after = spec
        return (*before, sum(_apply(rule, size) for size in self.sizes), *after)

    def cut(self, spec, leaf, indices):
        axis, rule, _, _ = spec
        counts = [_apply(rule, self.sizes[index]) for index in indices]
        if leaf.dim() <= axis or sum(counts) != leaf.shape[axis]:
            raise NotSplittable(f'an output of shape {tuple(leaf.shape)} for samples that should have {counts} rows')
        return list(leaf.split(counts, axis))

    def join(self, spec, parts, into):
        if sum(part.shape[spec[0]] for part in parts) != into.shape[spec[0]]:
            raise NotSplittable(f'stored parts with {[part.shape[spec[0]] for part in parts]} rows make up no {tuple(into.shape)}')
        return torch.cat(list(parts), spec[0], out=into)

    def respec(self, spec, before, after):
        axis, rule, lead, _ = spec
        if axis == 1 and tuple(after) == tuple(before[1:]):  # squeeze(0), [0]
            return 0, rule, (), tuple(after[1:])
        if axis == 0 and after and after[0]:
            ratio = _rule(self.sizes, after[0])
            fits = before[0] * after[0] and ratio is not None and ratio[0] == 'scale' == rule[0]
            return (0, ratio, (), tuple(after[1:])) if fits else None
        if axis == 1 and tuple(after[:2]) == tuple(before[:2]):
            return 1, rule, lead, tuple(after[2:])
        return None

    def reshape(self, spec, leaf):
        _, _, before, after = spec
        return leaf.reshape(*before, -1, *after)

    def fixed(self, spec):
        return spec[0] + 1

    def retailed(self, spec, after):
        return (*spec[:3], tuple(after[spec[0] + 1:]))


def _inside(boundaries: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    inside = boundaries[(boundaries >= start) & (boundaries <= stop)] - start
    if inside.numel() < 2 or inside[0] != 0 or inside[-1] != stop - start:
        raise NotSplittable(f'no boundaries at {start} and {stop}, where a sample begins and ends')
    return inside


def _rule(sizes: Sequence[int], found: int) -> Optional[tuple]:
    """How many output rows a sample has, so that there are ``found`` in all."""
    total = sum(sizes)
    if total and found and all(size * found % total == 0 for size in sizes):
        divisor = math.gcd(found, total)
        return 'scale', found // divisor, total // divisor
    return next((name for name in _CONVOLUTIONS if sum(_apply(name, size) for size in sizes) == found), None)


# What strided convolutions and poolings of audio towers leave of n frames.
_CONVOLUTIONS: dict[tuple, Callable[[int], int]] = {
    ('half',): lambda n: n // 2,
    ('half, padded',): lambda n: (n - 1) // 2 + 1,
    ('half, padded, then half',): lambda n: ((n - 1) // 2 + 1) // 2,
    ('half, padded, then pooled',): lambda n: ((n - 1) // 2 + 1 - 2) // 2 + 1,
    ('eighth of each hundred',): lambda n: _eighth(n % 100) + _eighth(100) * (n // 100),
}


def _eighth(n: int) -> int:
    """Of three convolutions with stride 2, over chunks that are padded apart."""
    for _ in range(3):
        n = (n - 1) // 2 + 1
    return n


def _apply(rule: tuple, size: int) -> int:
    return size * rule[1] // rule[2] if rule[0] == 'scale' else _CONVOLUTIONS[rule](size)
