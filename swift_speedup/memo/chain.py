"""Frozen calls, noted down so that their outputs can be looked up, or computed for some of the samples."""
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Optional, Protocol

import torch

from ..trees import flatten, version
from .arguments import Arguments, NotSplittable
from .cost import Cost
from .fingerprint import Fingerprint
from .key import call_prefix, content, sample_key
from .layout import SIZES, Layout

if TYPE_CHECKING:
    from .value import Value

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
        self._contents: list[dict[str, bytes]] = []  # of a root, what of each sample's own goes into its key
        self.root: Call = next(iter(parents.values())).call.root if parents else self
        self.outcome: list[Optional[str]] = [None] * len(layout) if self.root is self else []  # of each sample, for the counters
        self.seconds = 0.0  # of the last run, per unit of ``layout.sizes``
        self.lookup_seconds = 0.0  # of the host, not yet told to ``step.cost``
        self.recorded = False
        self._execute = execute
        self._parents = parents
        self._last: Optional[tuple[tuple[int, ...], list[torch.Tensor]]] = None
        self._ignored = (*(arguments.of_the_text if step.kind == 'media' else ()), *arguments.of_a_cache)
        self.device = arguments.tensors[0].device
        self.autocast = _Autocast.now(self.device.type)
        text = ';'.join([arguments.text, *(f'{place}:{value.text}' for place, value in parents.items())])
        self.fingerprint = step.fingerprint.current()
        self.prefix = call_prefix(self.fingerprint, layout.convention, text, mode, self.device.type)
        self.trail = (step.name, mode, layout.convention, *(value.trail for value in parents.values()))
        # What the shapes of outputs depend on beside the sizes of the samples.
        forms = [layout.form(name, tensor) for place, (name, tensor) in enumerate(self._named())
                 if place not in parents and name not in self._ignored]
        self.form = (self.prefix, tuple(form for form in forms if form is not None))
        self.keys = self._keys()

    def in_mode(self, mode: bytes) -> 'Call':
        """The same call, its values kept as those of ``mode``."""
        return Call(self.step, self.run, self.arguments, self.layout, self._parents, mode, self._execute)

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
        contents = [{name: column[place] for name, column in columns.items()} for place in range(len(self.layout))]
        if self.root is self:
            self._contents = contents
        return [sample_key(self.prefix, content) for content in contents]

    def sample(self, index: int) -> bytes:
        """16 bytes that name what of a sample's own went into a root."""
        return sample_key(b'', self._contents[index])

    def input_bytes(self) -> int:
        """Of what it goes on from."""
        return sum(math.prod(value.shape) * value.dtype.itemsize for value in self._parents.values())

    def run_whole(self) -> Any:
        """Really run the call as it came."""
        own = [tensor for place, tensor in enumerate(self.arguments.tensors) if place not in self._parents]
        before = [_state(tensor) for tensor in own]
        tensors = [self._parents[place].known_or_computed() if place in self._parents else tensor
                   for place, tensor in enumerate(self.arguments.tensors)]
        output = self._execute(self, range(len(self.layout)), *self.arguments.with_tensors(tensors))
        if [_state(tensor) for tensor in own] != before:
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

    def shape_marks(self) -> Sequence:
        """Of each sample, what must have been seen before the shapes of outputs are known: its size, or, where a mask or positions may
        decide how many rows an output has, the sample itself."""
        deciding = any(not tensor.is_floating_point() and name not in (*SIZES, *self._ignored)
                       for place, (name, tensor) in enumerate(self._named()) if place not in self._parents)
        return self.keys if deciding and self.layout.rows_may_vary else self.layout.marks()

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
            picked = _altered(picked, self.layout.pick(name, tensor, indices[:1]))
        return picked


def _state(tensor: torch.Tensor) -> int | bytes:
    """Another one after a write into the tensor."""
    return content(tensor) if tensor.is_inference() else version(tensor)


def _altered(doubled: torch.Tensor, once: torch.Tensor) -> torch.Tensor:
    """The same sample twice -> that sample and another one."""
    axis = next((axis for axis, (both, one) in enumerate(zip(doubled.shape, once.shape)) if both == 2 * one), None)
    if axis is None:
        raise NotSplittable(f'a tensor of shape {tuple(once.shape)} cannot be doubled')
    first, second = doubled.chunk(2, axis)
    return torch.cat([first, -0.5 * second if second.is_floating_point() else second.flip(-1)], axis)
