"""``MyModel`` and the ``.speedup`` handle: the one place that calls the stages in order."""
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from .config import SpeedupConfig
from .errors import AttachError
from .graph.frontier import Frontier, is_frozen
from .graph.swap import ClassSwap, is_swapped, original_class, root_handle, swappable
from .log import ensure_visible, logger
from .memo.fingerprint import Fingerprint
from .memo.memo import Memo
from .segments import state
from .segments.detect import Segment, find_towers, modules_to_swap
from .segments.gate import Gate
from .segments.plan import Plan, SegmentPlan, render
from .stats import Stats
from .store import NullStore, RamStore, Store
from .store.ram import GIB, default_budget


class _AttachedType(type):
    """``isinstance(model, MyModel)`` asks whether the plugin is attached to ``model``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return root_handle(instance) is not None


class MyModel(metaclass=_AttachedType):
    """``model = MyModel(model)``: attach the plugin and get the same object back.

    Frozen parts leave the autograd graph, and what frozen vision towers compute is computed once per image. What is frozen is
    read from ``requires_grad`` at every forward, so the call may come before or after freezing, adapters and the Trainer.

    Keywords are the fields of :class:`SpeedupConfig`. Attaching again with the same options changes nothing; with others it
    raises ``AttachError``, as do things that are not a module. ``model.speedup`` has the plan, the counters and ``remove()``.
    """

    def __new__(cls, model: nn.Module, **options: Any) -> nn.Module:
        return attach(model, SpeedupConfig.from_named(options))


def attach(model: nn.Module, config: SpeedupConfig) -> nn.Module:
    """``MyModel`` with a ready config."""
    if not isinstance(model, nn.Module):
        raise AttachError(f'MyModel takes a torch.nn.Module, got {type(model).__qualname__}')
    attached = root_handle(model)
    if attached is not None:
        if attached.config != config:
            raise AttachError(f'already attached with {attached.config}; call model.speedup.remove() before attaching with {config}')
        return model
    inside = next((path for path, module in model.named_modules() if is_swapped(module)), None)
    if inside is not None:
        raise AttachError(f'{inside or "this module"} already belongs to another attachment; call remove() on that one first')
    if not swappable(model):
        raise AttachError(f'{type(model).__qualname__} is a traced or scripted module; attach before tracing')
    Speedup(model, config)
    return model


@dataclasses.dataclass
class _Reused:
    segment: Segment
    gate: Gate
    memo: Memo


class Speedup:
    """The handle of one attachment, ``model.speedup``."""

    def __init__(self, model: nn.Module, config: SpeedupConfig):
        self.config = config
        self.stats = Stats()
        self._store = _make_store(config)
        self._names = {module: path for path, module in model.named_modules()}
        self._frontier = Frontier(model, self._names)
        self._reused = {segment.module: self._make_reused(segment) for segment in find_towers(model)}
        if config.cache != 'off' or config.dedup or config.eval:
            self._frontier.reused = frozenset(self._reused)
        self._frontier.evaluate = self._evaluate
        self._swap = ClassSwap(self._frontier.call, model, self)
        self._swap.apply(modules_to_swap(model))
        ensure_visible()
        if config.eval and self._reused:
            logger.warning('eval=true: frozen segments run in eval mode, which changes training where they have dropout or the like')
        logger.info('attached to %s: %s', original_class(model).__qualname__, self.plan.line())

    @property
    def plan(self) -> Plan:
        """What is skipped and cached now, and why not; evaluated from ``requires_grad`` as it is at this moment."""
        root = self._swap.root
        known: dict[nn.Module, bool] = {}
        frozen = [path for path, module in root.named_modules() if _has_weights(module) and is_frozen(module, known)]
        return Plan(tuple(self._plan_of(reused) for reused in self._reused.values()), _outermost(frozen),
                    tuple(path or '(root)' for path in self._frontier.manual.active()))

    def report(self) -> str:
        """Plan and counters as a table; printed as well as returned."""
        text = render(self.plan, self.stats)
        print(text)
        return text

    def clear(self) -> None:
        """Forget every cached output."""
        self._store.clear()
        self.stats.stored_samples = self.stats.stored_bytes = 0

    def remove(self) -> nn.Module:
        """Give every module its own class back and return the model; cached outputs are forgotten. Calling it again changes nothing."""
        self._swap.undo()
        self.clear()
        return self._swap.root

    def _make_reused(self, segment: Segment) -> _Reused:
        module = segment.module
        gate = Gate(segment.path, module)
        fingerprint = Fingerprint(lambda: state.settings(module), lambda: state.tensors(module))
        return _Reused(segment, gate, Memo(segment.path or '(root)', segment.signature, fingerprint, gate, self._store, self.stats,
                                           self.config.dedup))

    def _evaluate(self, module: nn.Module, run: Callable, args: tuple, kwargs: dict) -> Any:
        with self._mode_of(module):
            return self._reused[module].memo.evaluate(run, args, kwargs, state.mode(module))

    def _mode_of(self, module: nn.Module) -> AbstractContextManager[None]:
        """The mode in which a frozen segment is evaluated."""
        return state.in_eval_mode(module) if self.config.eval else nullcontext()

    def _plan_of(self, reused: _Reused) -> SegmentPlan:
        module, path = reused.segment.module, reused.segment.path
        trainable = next((name for name, tensor in state.tensors(module) if tensor.requires_grad), None)
        if trainable is not None:
            reason = f'{path}.{trainable} is trainable'.lstrip('.')
        elif self.config.cache == 'off':
            reason = 'cache=off'
        else:
            with self._mode_of(module):
                reason = reused.gate.refusal(state.mode(module)) or reused.memo.bypass_reason
        return SegmentPlan(path, original_class(module).__qualname__, sum(p.numel() for p in module.parameters()),
                           frozen=trainable is None, graph_skipped=trainable is None, cached=reason is None, reason=reason)


def _make_store(config: SpeedupConfig) -> Store:
    if config.cache == 'off':
        return NullStore()
    return RamStore(default_budget() if config.ram_gib is None else int(config.ram_gib * GIB))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _outermost(paths: list[str]) -> tuple[str, ...]:
    """Drop what lies inside another path of the list; parents come first in it."""
    kept: list[str] = []
    inside: set[str] = set()
    for path in paths:
        parents = {path[:place] for place, letter in enumerate(path) if letter == '.'} | {''}
        if path and parents & inside:
            continue
        inside.add(path)
        kept.append(path or '(root)')
    return tuple(kept)
