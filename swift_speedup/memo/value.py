"""What frozen calls answer with: their outputs, or these with rows and columns moved, for as long as nothing needs the numbers."""
from collections.abc import Callable, Sequence
from typing import Optional

import torch

from ..errors import ShapeError
from .chain import Call
from .key import Digest
from .layout import Spec


class Value:
    """What stands behind a deferred tensor: an output leaf of a call, or the same with rows and columns moved.

    See ``deferred.Value``.
    """

    def __init__(self, call: Call, spec: Spec, dtype: torch.dtype, device: torch.device, settle: Callable[['Value'], torch.Tensor],
                 strides: Optional[Sequence[int]] = None):
        self.call = call
        self.layout = call.layout
        self.spec = spec
        self.shape = self.layout.shape(spec)
        self.dtype = dtype
        self.device = device
        self.strides = strides
        self.known: Optional[torch.Tensor] = None
        self._computed: Optional[torch.Tensor] = None  # for a further call, not yet kept
        self._settle = settle
        self._keys: Optional[list[bytes]] = None

    trail: tuple
    text: str

    def rows(self, indices: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def _sources(self) -> list[bytes]:
        raise NotImplementedError

    @property
    def keys(self) -> list[bytes]:
        if self._keys is None:
            self._keys = [Digest().add('source', source).add('leaf', self.text).value() for source in self._sources()]
        return self._keys

    def real(self) -> torch.Tensor:
        if self.known is None:
            known = self._settle(self)
            if (tuple(known.shape), known.dtype) != (self.shape, self.dtype):  # the model may have acted on it
                raise ShapeError(
                    f'{self.call.step.name}: an output is {known.dtype} {tuple(known.shape)}; after the batches before, '
                    f'{self.dtype} {self.shape} was expected. Its shape depends on more than the inputs that swift_speedup looks at: '
                    'train with cache=off (--frozen_cache off), and please report it')
            self.known = known
        return self.known

    def known_or_computed(self) -> torch.Tensor:
        """The real tensor for a further call, without anything being looked up or kept."""
        if self.known is not None:
            return self.known
        if self.whole() is None:
            self._computed = self.rows(range(len(self.layout)))
        return self.whole()

    def whole(self) -> Optional[torch.Tensor]:
        """The real tensor if its call was run as a whole."""
        return self._computed if self._computed is not None else self._from_whole()

    def _from_whole(self) -> Optional[torch.Tensor]:
        raise NotImplementedError

    def empty(self, device: Optional[torch.device] = None) -> torch.Tensor:
        """Laid out in memory as the real tensor would be: kernels may order sums by that."""
        if self.strides is None or _overlaps(self.shape, self.strides):
            return torch.empty(self.shape, dtype=self.dtype, device=device or self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device or self.device)

    def parts(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Compute these samples, and those that cannot be separated from them."""
        indices = self.layout.closure(indices)
        return dict(zip(indices, self.layout.cut(self.spec, self.rows(indices), indices)))

    def moved(self, func: Callable, args: tuple, kwargs: dict) -> Optional['Value']:
        try:
            after = func(self.empty(_META), *args, **kwargs)
        except Exception:  # the real call tells the user what is wrong
            return None
        name = func.__name__
        spec = self._spec_after(name, args, kwargs, tuple(after.shape))
        elsewhere = after.device.type != 'meta' and after.device != self.device
        if spec is None or elsewhere or (name in _RESHAPES and after.dtype != self.dtype):
            return None
        if name in _COPIES:
            same = after.dtype == self.dtype
            return Copied(self, spec, after, '' if same else f' {after.dtype}', lambda tensor: func(tensor, *args, **kwargs))
        if name in _RESHAPES:
            return Moved(self, spec, after, f' reshape{spec}', lambda tensor: self.layout.reshape(spec, tensor))
        return Moved(self, spec, after, f' {name}{args}{kwargs}', lambda tensor: func(tensor, *args, **kwargs))

    def _spec_after(self, name: str, args: tuple, kwargs: dict, after: tuple[int, ...]) -> Optional[Spec]:
        fixed = self.layout.fixed(self.spec)
        if name in _COPIES:
            return self.spec if after == self.shape else None
        if name in _RESHAPES:
            return self.layout.respec(self.spec, self.shape, after)
        if name in ('permute', 'transpose'):
            axes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            axes = [axis % len(self.shape) for axis in axes]
            kept = axes[:fixed] == list(range(fixed)) if name == 'permute' else min(axes, default=0) >= fixed
            return self.layout.retailed(self.spec, after) if kept and not kwargs else None
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if all(isinstance(item, (int, slice)) or item is Ellipsis for item in index) and self._keeps_rows(index, fixed):
            return self.layout.retailed(self.spec, after)
        return None

    def _keeps_rows(self, index: tuple, fixed: int) -> bool:
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (len(self.shape) - len(index) + 1), *index[place + 1:])
        return all(item == slice(None) for item in index[:fixed])


def form_of(leaf: torch.Tensor) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    """What a ``Leaf`` must know of an output beside its spec; the last: its dimensions, the one with the longest strides first."""
    return leaf.dtype, leaf.device, tuple(sorted(range(leaf.dim()), key=lambda axis: -leaf.stride(axis)))


def _dense(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return strides


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share a place in memory, as after ``expand``."""
    reach = 0  # of all dimensions with shorter strides
    for stride, size in sorted(zip(strides, shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


_META = torch.device('meta')
_COPIES = ('detach', 'contiguous', 'clone', 'to', 'type', 'float', 'half', 'bfloat16')
_RESHAPES = ('reshape', 'view', 'flatten', 'squeeze', 'unsqueeze')


class Leaf(Value):
    """Output ``number`` of a call."""

    def __init__(self, call: Call, number: int, spec: Spec, dtype: torch.dtype, device: torch.device, order: tuple[int, ...],
                 settle: Callable[[Value], torch.Tensor]):
        super().__init__(call, spec, dtype, device, settle, _dense(call.layout.shape(spec), order))
        self._number = number
        self.text = f'{number}'
        self.trail = (*call.trail, number)

    def _sources(self):
        return self.call.keys

    def rows(self, indices):
        return self.call.rows(indices)[self._number]

    def _from_whole(self):
        return self.call.outputs[self._number] if self.call.outputs is not None else None


class Moved(Value):
    """``parent`` with rows and columns moved by ``replay``, which ``text`` describes. ``after``: what that makes of an empty one."""

    def __init__(self, parent: Value, spec: Spec, after: torch.Tensor, text: str, replay: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(parent.call, spec, after.dtype, parent.device, parent._settle, after.stride())
        self._parent = parent
        self._replay = replay
        self.text = parent.text + text
        self.trail = (*parent.trail, text) if text else parent.trail

    def _sources(self):
        return self._parent._sources()

    def rows(self, indices):
        return self._replay(self._parent.rows(indices))

    def _from_whole(self):
        whole = self._parent.known if self._parent.known is not None else self._parent.whole()
        if whole is None:
            return None
        with torch.no_grad():
            return self._replay(whole)


class Copied(Moved):
    """A value of another dtype, or the same again: it is looked up as its parent is."""

    def real(self):
        if self.known is None:
            real = self._parent.real()
            with torch.no_grad():
                self.known = self._replay(real)
        return self.known
