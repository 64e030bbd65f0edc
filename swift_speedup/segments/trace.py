"""What really ran in a training forward: which frozen modules ran without a graph, in which order, and what fed them.

Detection reads this, because module trees say neither. Data flow is followed through every torch function between two modules;
inside a module that runs as one only its inputs count.
"""
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..trees import tensors_in
from . import gate
from .entries import names_media

_MOST_TRACES = 8  # models that freeze other parts at every step are not traced for ever


@dataclasses.dataclass
class Unit:
    """An outermost frozen module that ran without a graph. Calls of the same entry are one unit."""

    path: str
    module: nn.Module
    entry: str  # ``__call__`` or the name of another method
    sources: set[int]  # positions, in ``Trace.units``, of the units whose outputs reached its inputs
    media: bool  # raw floating-point inputs of the batch reached it
    impure: Optional[str]  # random numbers drawn or buffers written while it ran


@dataclasses.dataclass
class Trace:
    """One training forward. ``passed``: frozen modules that had to stay in the graph, because their inputs need grad."""

    units: list[Unit] = dataclasses.field(default_factory=list)
    passed: list[str] = dataclasses.field(default_factory=list)
    entered: set[nn.Module] = dataclasses.field(default_factory=set)
    media: bool = False  # the batch held pixels, frames or sound


class Tracer:
    """Observer of the frontier (see ``graph.frontier.Observer``). ``finished(trace)`` is told after each forward of the root."""

    def __init__(self, names: Mapping[nn.Module, str], finished: Callable[[Trace], None]):
        self.trace: Optional[Trace] = None  # of the last complete forward
        self._names = names
        self._finished = finished
        self._now = Trace()
        self._positions: dict[tuple[nn.Module, str], int] = {}
        self._impure: Optional[str] = None
        self._flow = _Flow()
        self._seen: Optional[dict[nn.Module, bool]] = None
        self._count = 0

    def wanted(self, frozen: Mapping[nn.Module, bool]) -> bool:
        if self._seen is None:
            self._seen = dict(frozen)
            return False
        changed = any(frozen.get(module, value) != value for module, value in self._seen.items())
        if changed and self._count < _MOST_TRACES:
            self._seen = None
            return True
        return False

    @contextmanager
    def forward(self, root: bool, args: tuple, kwargs: dict) -> Iterator[None]:
        self._now.media |= root and names_media(
            name for name, value in kwargs.items() if any(t.is_floating_point() and t.numel() for t in tensors_in(value)))
        self._flow.start([t for t in tensors_in([args, kwargs]) if t.is_floating_point()])
        with self._flow:
            yield
        if root:
            self.trace, self._now, self._positions, self._flow = self._now, Trace(), {}, _Flow()
            self._count += 1
            self._finished(self.trace)

    def entered(self, module: nn.Module) -> None:
        self._now.entered.add(module)

    @contextmanager
    def skipping(self, module: nn.Module) -> Iterator[None]:
        with gate.watching(module) as seen:
            yield
        self._impure = '; '.join(seen) or None

    def skipped(self, module: nn.Module, entry: str, args: tuple, kwargs: dict, output: Any) -> None:
        if module not in self._names:  # a replica of another thread
            return
        place = self._positions.setdefault((module, entry), len(self._now.units))
        if place == len(self._now.units):
            self._now.units.append(Unit(self._names[module], module, entry, set(), False, None))
        unit = self._now.units[place]
        sources = self._flow.reaching([args, kwargs])
        unit.media |= _Flow.BATCH in sources
        unit.sources |= sources - {_Flow.BATCH, place}
        unit.impure = unit.impure or self._impure
        self._flow.set(tensors_in(output), frozenset({place}))

    def passed(self, module: nn.Module) -> None:
        if module in self._names and self._names[module] not in self._now.passed:
            self._now.passed.append(self._names[module])

    def trained(self, args: tuple, kwargs: dict, output: Any) -> None:
        # Checkpointed modules answer through an autograd function, which is no torch function.
        self._flow.set([t for t in tensors_in(output) if not self._flow.knows(t)], self._flow.reaching([args, kwargs]))


class _Flow(TorchFunctionMode):
    """Which units' outputs went into a tensor; the tensors themselves are not kept alive."""

    BATCH = -1  # stands for raw floating-point inputs

    def __init__(self):
        super().__init__()
        self._reached: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def start(self, inputs: Iterable[torch.Tensor]) -> None:
        self.set([tensor for tensor in inputs if not self.knows(tensor)], frozenset({self.BATCH}))

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor in self._reached

    def set(self, tensors: Iterable[torch.Tensor], sources: frozenset[int]) -> None:
        for tensor in tensors:
            self._reached[tensor] = sources

    def reaching(self, value: Any) -> frozenset[int]:
        return frozenset().union(*(self._reached.get(tensor, ()) for tensor in tensors_in(value)))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        sources = self.reaching([args, kwargs])
        if sources:
            # Assignments such as ``a[mask] = b`` answer None and write into their first argument.
            self.set(tensors_in(args[:1] if output is None else output), sources)
        return output
