"""Token sequences: ``(batch, tokens, ...)`` tensors with left or right padding, or several sequences packed into one row.

Samples are stored without padding. Which positions are padding, and where one packed sequence ends, is read from the attention mask or
from ``cu_seq_lens``; a mask that cannot be read that way makes each row with its padding one sample.
"""
from collections.abc import Sequence
from typing import Optional

import numpy
import torch

from .arguments import Arguments, NotSplittable
from .layout import Layout

MASK = 'attention_mask'
BOUNDARIES = ('cu_seq_lens_q', 'cu_seq_lens_k', 'cu_seqlens')
_CAUSAL, _FULL, _UNKNOWN = b'causal', b'full', b'no mask'


class Tokens(Layout):
    """``causal`` says what no mask at all means to the layers: ``True``, ``False`` or ``None`` (not known)."""

    convention = 'tokens'
    rows_may_vary = False

    def __init__(self, batch: int, length: int, spans: Sequence[tuple[int, numpy.ndarray]], causal: Optional[bool]):
        self._batch = batch
        self._length = length
        self._rows = [row for row, _ in spans]
        self._positions = [_as_slice(positions) for _, positions in spans]
        self._pattern = {True: _CAUSAL, False: _FULL, None: _UNKNOWN}[causal]
        self._whole = all(place == slice(0, length) for place in self._positions) and len(spans) == batch
        self.sizes = tuple(len(positions) for _, positions in spans)

    @classmethod
    def of(cls, arguments: Arguments, main: torch.Tensor, causal: Optional[bool]) -> 'Tokens':
        """``main`` has shape ``(batch, tokens, ...)``."""
        batch, length = main.shape[:2]
        mask = arguments.get(MASK)
        boundaries = next((arguments.get(name) for name in BOUNDARIES if arguments.get(name) is not None), None)
        if boundaries is not None:
            if batch != 1 or int(boundaries[-1]) != length:
                raise NotSplittable(f'cu_seq_lens for {int(boundaries[-1])} tokens, but the batch has {batch} x {length}')
            ends = boundaries.tolist()
            return cls(1, length, [(0, numpy.arange(*pair)) for pair in zip(ends, ends[1:])], causal)
        spans = [span for row in range(batch) for span in _spans(mask, row, batch, length)]
        return cls(batch, length, spans, causal)

    def closure(self, indices):
        wanted = {self._rows[index] for index in indices}
        return [index for index, row in enumerate(self._rows) if row in wanted]

    def _kind(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Whether a tensor has token pairs, tokens of a batch (the batch along that dimension), tokens only, or neither."""
        shape, length = tuple(tensor.shape), self._length
        if len(shape) == 4 and shape[3] == length and shape[2] in (1, length) and shape[0] in (1, self._batch):
            return 'pairs', 0
        for axis in range(len(shape) - 1):
            if shape[axis] in (1, self._batch) and shape[axis + 1] == length:
                return 'tokens', axis
        return ('shared', 0) if shape and shape[0] == length else ('all', 0)

    def pieces(self, name, tensor):
        if name in BOUNDARIES:
            return [self._pattern] * len(self)
        kind, axis = self._kind(tensor)
        if kind == 'all':
            return None
        return [self._piece(name, tensor, kind, axis, row, positions) for row, positions in zip(self._rows, self._positions)]

    def _piece(self, name, tensor, kind, axis, row, positions):
        if kind == 'shared':
            return tensor[positions]
        part = tensor.select(axis, row if tensor.shape[axis] > 1 else 0)
        if kind == 'tokens':
            part = part.movedim(axis, 0)[positions]
            return self._pattern if name == MASK and bool(_allowed(part).all()) else part
        part = part[..., positions]
        part = part if part.shape[1] == 1 else part[:, positions]
        return _pattern_of(part) if name == MASK else part

    def marks(self):
        return (0,) * len(self)  # outputs have the form (batch, tokens, ...) whatever the lengths

    def absent(self, name):
        return self._pattern if name == MASK else None

    def pick(self, name, tensor, indices):
        if name in BOUNDARIES:
            return tensor
        kind, axis = self._kind(tensor)
        if kind in ('all', 'shared') or tensor.shape[axis] == 1:
            return tensor if self._batch > 1 or kind in ('all', 'shared') else torch.cat([tensor] * len(self._picked(indices)), axis)
        return tensor.index_select(axis, torch.tensor(self._picked(indices), device=tensor.device))

    def _picked(self, indices: Sequence[int]) -> list[int]:
        """Rows of a call with these samples; the same sample given twice is there twice."""
        rows = [self._rows[index] for index in indices]
        return rows if len(set(indices)) < len(indices) else list(dict.fromkeys(rows))

    def form(self, name, tensor):
        kind, axis = self._kind(tensor)
        shape = tuple(tensor.shape)
        if name in BOUNDARIES or name == MASK:
            return None
        if kind == 'pairs':
            return kind
        return {'tokens': (*shape[:axis], *shape[axis + 2:]), 'shared': shape[1:], 'all': shape}[kind]

    def spec(self, leaf):
        if tuple(leaf.shape[:2]) != (self._batch, self._length):
            raise NotSplittable(f'an output of shape {tuple(leaf.shape)} for {self._batch} x {self._length} tokens')
        return tuple(leaf.shape[2:])

    def shape(self, spec):
        return (self._batch, self._length, *spec)

    def cut(self, spec, leaf, indices):
        picked = self._picked(indices)
        if tuple(leaf.shape) != (len(picked), self._length, *spec):
            raise NotSplittable(f'an output of shape {tuple(leaf.shape)} for {len(picked)} rows of {self._length} tokens')
        if len(picked) == len(indices):
            return [leaf[place, self._positions[index]] for place, index in enumerate(indices)]
        return [leaf[picked.index(self._rows[index]), self._positions[index]] for index in indices]

    def join(self, spec, parts, into):
        if self._whole:
            return torch.stack(list(parts), out=into)
        into.zero_()
        for row, positions, part in zip(self._rows, self._positions, parts):
            into[row, positions] = part
        return into

    def respec(self, spec, before, after):
        return tuple(after[2:]) if tuple(after[:2]) == tuple(before[:2]) else None

    def reshape(self, spec, leaf):
        return leaf.reshape(*leaf.shape[:2], *spec)

    def fixed(self, spec):
        return 2

    def retailed(self, spec, after):
        return tuple(after[2:])


def _spans(mask: Optional[torch.Tensor], row: int, batch: int, length: int) -> list[tuple[int, numpy.ndarray]]:
    """``(row, positions)`` of each sequence in a row."""
    everything = [(row, numpy.arange(length))]
    if mask is None or mask.dim() not in (2, 4) or mask.shape[-1] != length or mask.shape[0] not in (1, batch):
        return everything
    own = mask[row if mask.shape[0] > 1 else 0]
    allowed = _allowed(own if mask.dim() == 2 else own[0]).cpu().numpy()
    if allowed.ndim == 1 or allowed.shape[0] == 1:
        real = numpy.flatnonzero(allowed.reshape(-1))
        return [(row, real)] if real.size else everything
    real = numpy.flatnonzero(numpy.diagonal(allowed))
    if not real.size:
        return everything
    inner = allowed[numpy.ix_(real, real)]
    if int(allowed[real].sum()) != int(inner.sum()):  # real tokens attend to what looks like padding
        return everything
    return [(row, real[start:stop]) for start, stop in _blocks(inner)]


def _blocks(allowed: numpy.ndarray) -> list[tuple[int, int]]:
    """Consecutive stretches of tokens that attend to nothing outside their own."""
    size = len(allowed)
    places = numpy.arange(size)
    some = allowed.any(1)
    first = numpy.where(some, allowed.argmax(1), places)
    last = numpy.where(some, size - 1 - allowed[:, ::-1].argmax(1), places)
    reach_back = numpy.minimum.accumulate(first[::-1])[::-1]  # the first token that this one or a later one attends to
    reach_on = numpy.maximum.accumulate(last)
    starts = [0, *(place for place in range(1, size) if reach_back[place] >= place and reach_on[place - 1] < place)]
    return list(zip(starts, [*starts[1:], size]))


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    """``True`` where attention is allowed: of a bool mask, of 0/1 integers, of numbers that are added to scores."""
    if mask.dtype is torch.bool:
        return mask
    return mask == 0 if mask.is_floating_point() else mask != 0


def _pattern_of(part: torch.Tensor) -> bytes | torch.Tensor:
    """A name for the usual patterns of ``(heads, queries, keys)``; the part itself for all others."""
    if part.is_floating_point() and not bool(((part == 0) | (part <= torch.finfo(part.dtype).min / 2)).all()):
        return part  # biases
    allowed = _allowed(part)
    if bool(allowed.all()):
        return _CAUSAL if allowed.shape[-1] == allowed.shape[-2] == 1 else _FULL
    if allowed.shape[-1] == allowed.shape[-2] and bool((allowed == torch.ones_like(allowed[0]).tril()).all()):
        return _CAUSAL
    return allowed


def _as_slice(positions: numpy.ndarray) -> slice | torch.Tensor:
    if len(positions) and positions[-1] - positions[0] + 1 == len(positions):
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return torch.from_numpy(positions)
