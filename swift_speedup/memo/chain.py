"""Frozen calls and the values they answer with, noted down so that they can be looked up, or computed for some of the samples."""
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Optional, Protocol

import torch

from ..errors import ShapeError
from ..trees import flatten
from .arguments import Arguments, NotSplittable
from .cost import Cost
from .fingerprint import Fingerprint
from .key import Digest, call_prefix, content, sample_key
from .layout import SIZES, Layout, Spec

Run = Callable[[tuple, dict], Any]
Execute = Callable[['Call', Sequence[int], tuple, dict], Any]  # really run a call with some of its samples


class Purity(Protocol):
    """Whether a segment may be reused (Rule 4), by train/eval mode."""

    def refusal(self, mode: bytes) -> Optional[str]: ...
    def verified(self, mode: bytes) -> bool: ...
    def confirm(self, mode: bytes) -> None: ...
    def forbid(self, mode: bytes, reason: str) -> None: ...
    def observe(self, mode: bytes) -> Any: ...
    def preserved(self) -> Any: ...
    def canonical(self, mode: bytes) -> bytes: ...  # a mode that gives the same values, or this one
    def share(self, mode: bytes, other: bytes) -> None: ...
    def modes(self) -> Sequence[bytes]: ...  # verified ones that stand for themselves
    def switched(self, mode: bytes) -> Any: ...  # the module in that mode


@dataclasses.dataclass
class Step:
    """A frozen callable. ``kind``: ``media`` (tower), ``block`` (a layer inside one), ``tokens`` (text encoder, layer of a text
    model) or ``follower``: what only goes on from the outputs of others. ``causal``: what no attention mask means to it. ``packing``
    tells, inside a tower that was called with a grid, how many rows each image has there."""

    name: str
    signature: inspect.Signature  # without ``self``
    fingerprint: Fingerprint
    purity: Purity
    kind: str
    causal: Optional[bool] = None
    packing: Callable[[], Sequence[int]] = tuple
    cost: Optional[Cost] = None  # None: never turned off
    whole: bool = False  # samples cannot be told apart: the whole call is one
    note: Optional[str] = None  # why so
    refused: Optional[str] = None  # why its last call was not looked up


@dataclasses.dataclass
class _Autocast:
    """Autocast as it was when the call was made: its value may be computed elsewhere."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device_type: str) -> '_Autocast':
        return cls(tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in {'cpu', device_type}))

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, enabled, dtype in self.states:
                if (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(name, dtype, enabled))
            yield


class Call:
    """One call of a step. ``parents``: positions of those tensors that are values of earlier calls of the same chain."""

    def __init__(self, step: Step, run: Run, arguments: Arguments, layout: Layout, parents: dict[int, 'Value'], mode: bytes,
                 execute: Execute):
        self.step = step
        self.run = run
        self.arguments = arguments
        self.layout = layout
        self.mode = mode
        self.outputs: Optional[list[torch.Tensor]] = None  # of the whole call, once it was really run
        self.root: Call = next(iter(parents.values())).call.root if parents else self
        self.outcome: list[Optional[str]] = [None] * len(layout) if self.root is self else []  # of each sample, for the counters
        self.seconds = 0.0  # of the last run, per unit of ``layout.sizes``
        self.lookup_seconds = 0.0  # of the host, not yet told to ``step.cost``
        self.recorded = False
        self._execute = execute
        self._parents = parents
        self._last: Optional[tuple[tuple[int, ...], list[torch.Tensor]]] = None
        self._ignored = arguments.of_the_text if step.kind == 'media' else ()
        self.device = arguments.tensors[0].device
        self.autocast = _Autocast.now(self.device.type)
        text = ';'.join([arguments.text, *(f'{place}:{value.text}' for place, value in parents.items())])
        self.prefix = call_prefix(step.fingerprint.current(), layout.convention, text, mode, self.device.type)
        self.trail = (step.name, mode, layout.convention, *(value.trail for value in parents.values()))
        # What the shapes of outputs depend on beside the sizes of the samples.
        forms = [layout.form(name, tensor) for place, (name, tensor) in enumerate(self._named())
                 if place not in parents and name not in self._ignored]
        self.form = (self.prefix, tuple(form for form in forms if form is not None))
        self.keys = self._keys()

    def calls(self) -> Iterator['Call']:
        """This one and those before it."""
        yield self
        for value in self._parents.values():
            yield from value.call.calls()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.arguments.names, self.arguments.tensors))

    def _keys(self) -> list[bytes]:
        columns: dict[str, Sequence[bytes]] = {}
        known = self.root.__dict__.setdefault('contents', {})  # the layers of a stack share masks and positions
        for place, (name, tensor) in enumerate(self._named()):
            if place in self._parents:
                columns[name] = self._parents[place].keys
                continue
            if name in self._ignored:
                continue
            if (id(tensor), name) not in known:
                pieces = self.layout.pieces(name, tensor)
                digests = [content(tensor)] * len(self.layout) if pieces is None else [content(piece) for piece in pieces]
                known[id(tensor), name] = tensor, digests  # the tensor too: its id must not be given to another
            columns[name] = known[id(tensor), name][1]
        for name in self.arguments.absent:
            meaning = self.layout.absent(name)
            if meaning is not None:
                columns[name] = [content(meaning)] * len(self.layout)
        return [sample_key(self.prefix, {name: column[place] for name, column in columns.items()})
                for place in range(len(self.layout))]

    def run_whole(self) -> Any:
        """Really run the call as it came."""
        own = [tensor for place, tensor in enumerate(self.arguments.tensors) if place not in self._parents]
        before = [tensor._version for tensor in own]
        tensors = [self._parents[place].known_or_computed() if place in self._parents else tensor
                   for place, tensor in enumerate(self.arguments.tensors)]
        output = self._execute(self, range(len(self.layout)), *self.arguments.with_tensors(tensors))
        if [tensor._version for tensor in own] != before:
            self.step.purity.forbid(self.mode, 'it writes into its arguments')
        return output

    def rows(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Output leaves of the call with these samples only (in the layout of such a call). An index that is there twice stands, the
        second time, for another sample of the same size."""
        wanted = tuple(indices)
        if self._last is None or self._last[0] != wanted:
            self.answer(wanted)
        return self._last[1]

    def answer(self, indices: Sequence[int]) -> Any:
        """Really run the call with these samples; :meth:`rows` has the output's leaves."""
        wanted = tuple(indices)
        tensors = [self._parents[place].rows(wanted) if place in self._parents else self._picked(name, tensor, wanted)
                   for place, (name, tensor) in enumerate(self._named())]
        output = self._execute(self, wanted, *self.arguments.with_tensors(tensors))
        self._last = wanted, flatten(output)[1]
        return output

    def shape_marks(self) -> set:
        """What must have been seen before the shapes of outputs are known: sizes of samples, or, where a mask or positions may decide
        how many rows an output has, the samples themselves."""
        deciding = any(not tensor.is_floating_point() and name not in (*SIZES, *self._ignored)
                       for place, (name, tensor) in enumerate(self._named()) if place not in self._parents)
        return set(self.keys) if deciding and self.layout.rows_may_vary else self.layout.distinct()

    def forget(self) -> None:
        """What :meth:`rows` keeps for the next output of the same samples."""
        self._last = None

    def _picked(self, name: str, tensor: torch.Tensor, indices: tuple[int, ...]) -> torch.Tensor:
        if name in self._ignored:  # were it of any meaning, the check of the first batch would see that
            return torch.zeros_like(tensor)
        if indices == tuple(range(len(self.layout))):
            return tensor
        picked = self.layout.pick(name, tensor, indices)
        if len(set(indices)) < len(indices) and self.root is self and tensor is self.arguments.tensors[0]:
            picked = _altered(picked, tensor)
        return picked


def _altered(doubled: torch.Tensor, once: torch.Tensor) -> torch.Tensor:
    """The same sample twice -> that sample and another one."""
    axis = next((axis for axis, (both, one) in enumerate(zip(doubled.shape, once.shape)) if both == 2 * one), None)
    if axis is None:
        raise NotSplittable(f'a tensor of shape {tuple(once.shape)} cannot be doubled')
    first, second = doubled.chunk(2, axis)
    return torch.cat([first, -0.5 * second if second.is_floating_point() else second.flip(-1)], axis)


class Value:
    """What stands behind a deferred tensor: an output leaf of a call, or the same with rows and columns moved.

    See ``deferred.Value``.
    """

    def __init__(self, call: Call, spec: Spec, dtype: torch.dtype, device: torch.device, settle: Callable[['Value'], torch.Tensor]):
        self.call = call
        self.layout = call.layout
        self.spec = spec
        self.shape = self.layout.shape(spec)
        self.dtype = dtype
        self.device = device
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

    def parts(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Compute these samples, and those that cannot be separated from them."""
        indices = self.layout.closure(indices)
        return dict(zip(indices, self.layout.cut(self.spec, self.rows(indices), indices)))

    def moved(self, func: Callable, args: tuple, kwargs: dict) -> Optional['Value']:
        try:
            after = func(torch.empty(self.shape, dtype=self.dtype, device='meta'), *args, **kwargs)
        except Exception:  # the real call tells the user what is wrong
            return None
        name = func.__name__
        spec = self._spec_after(name, args, kwargs, tuple(after.shape))
        elsewhere = after.device.type != 'meta' and after.device != self.device
        if spec is None or elsewhere or (name in _RESHAPES and after.dtype != self.dtype):
            return None
        if name in _COPIES:
            same = after.dtype == self.dtype
            return Copied(self, spec, after.dtype, '' if same else f' {after.dtype}', lambda tensor: func(tensor, *args, **kwargs))
        if name in _RESHAPES:
            return Moved(self, spec, self.dtype, f' reshape{spec}', lambda tensor: self.layout.reshape(spec, tensor))
        return Moved(self, spec, after.dtype, f' {name}{args}{kwargs}', lambda tensor: func(tensor, *args, **kwargs))

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


_COPIES = ('detach', 'contiguous', 'clone', 'to', 'type', 'float', 'half', 'bfloat16')
_RESHAPES = ('reshape', 'view', 'flatten', 'squeeze', 'unsqueeze')


class Leaf(Value):
    """Output ``number`` of a call."""

    def __init__(self, call: Call, number: int, spec: Spec, dtype: torch.dtype, device: torch.device,
                 settle: Callable[[Value], torch.Tensor]):
        super().__init__(call, spec, dtype, device, settle)
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
    """``parent`` with rows and columns moved by ``replay``, which ``text`` describes."""

    def __init__(self, parent: Value, spec: Spec, dtype: torch.dtype, text: str, replay: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(parent.call, spec, dtype, parent.device, parent._settle)
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
