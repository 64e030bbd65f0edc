"""``MyModel`` and the ``.speedup`` handle: the one place that calls the stages in order."""
import dataclasses
from collections.abc import Callable
from typing import Any, Optional

from torch import nn

from .config import SpeedupConfig
from .errors import AttachError
from .graph.frontier import Frontier
from .graph.swap import ClassSwap, is_swapped, original_class, root_handle, swappable
from .log import ensure_visible, logger
from .memo.deferred import settled
from .segments import detect, planner
from .segments.entries import METHODS
from .segments.flops import Prediction, StepFlops, count_steps
from .segments.plan import Plan, render
from .segments.reuse import Reuse
from .segments.trace import Trace, Tracer
from .stats import Stats
from .store import Store
from .store.choose import make_store


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


def attach(model: nn.Module, config: SpeedupConfig, beside: Optional['Speedup'] = None, store: Optional[Store] = None) -> nn.Module:
    """``MyModel`` with a ready config; ``beside``: the handle of another model, whose store and counters are used; ``store``: another
    one than the config describes."""
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
    Speedup(model, config, beside, store)
    return model


class Speedup:
    """The handle of one attachment, ``model.speedup``."""

    def __init__(self, model: nn.Module, config: SpeedupConfig, beside: Optional['Speedup'] = None, store: Optional[Store] = None):
        self.config = config
        self.stats = Stats() if beside is None else beside.stats
        self._owns_store = beside is None
        self._at_removal: list[Callable[[], None]] = []
        self.store = beside.store if beside is not None else make_store(config) if store is None else store
        self.stats.stored_samples, self.stats.stored_bytes = len(self.store), self.store.nbytes
        names = {module: path for path, module in model.named_modules()}
        self._tracer = Tracer(names, self._on_trace)
        self._frontier = Frontier(model, names, self._tracer)
        self._reuse = Reuse(names, config, self.stats, self.store, detect.reusable_kinds(model),
                            None if beside is None else beside._reuse)
        self._frontier.evaluate, self._frontier.settle, self._frontier.entering = self._reuse.evaluate, settled, self._reuse.entering
        self._swap = ClassSwap(self._frontier.call, model, self, METHODS)
        self._swap.apply(detect.modules_to_swap(model))
        ensure_visible()
        if config.eval and detect.expected_towers(model):
            logger.warning('eval=true: frozen segments run in eval mode, which changes training where they have dropout or the like')
        logger.info('attached to %s: %s', original_class(model).__qualname__, self.plan.line())

    @property
    def plan(self) -> Plan:
        """What is skipped and cached now, and why not; evaluated from ``requires_grad`` as it is at this moment.

        Before the first training forward segments are what the module tree lets expect, afterwards what was really executed.
        """
        return self._plan(self._reuse.refusal)

    def predict(self, stock: StepFlops, steps: Callable[[], Any], batches: int) -> tuple[Plan, Prediction]:
        """The plan as it will be once there are weights, and what FLOPs say about it.

        The model's parameters are on the meta device. ``steps()`` runs forward and backward of ``batches`` batches, and ``stock`` is
        what ``segments.flops.count_steps`` found for them before the plugin was attached.
        """
        count_steps(self._swap.root, steps, {})  # traces
        plan = self._plan(self._reuse.expected_refusal)
        modules = {path: module for path, module in self._swap.root.named_modules()}
        watched = {path: modules[path] for segment in plan.segments if segment.graph_skipped for path in segment.modules}
        counted = count_steps(self._swap.root, steps, watched)
        forward = {segment.path: sum(counted.forward[path] for path in segment.modules)
                   for segment in plan.segments if segment.graph_skipped}
        reused = tuple(segment.path for segment in plan.segments if segment.cached)
        return plan, Prediction(batches, stock.total, counted.total, forward, reused)

    def _plan(self, refusal: planner.Refusal) -> Plan:
        left_alone = [path or '(root)' for path in self._frontier.manual.active()]
        plan = planner.make_plan(self._swap.root, self._tracer.trace, refusal, left_alone)
        return dataclasses.replace(plan, remarks=(*plan.remarks, *self._reuse.remarks()))

    @property
    def root(self) -> nn.Module:
        return self._swap.root

    def reusable_modules(self) -> list[nn.Module]:
        """The outermost frozen modules whose outputs can be looked up, as far as the module tree tells."""
        return self._reuse.frozen_kinds()

    def at_removal(self, undo: Callable[[], None]) -> None:
        """For hosts that change the model: call ``undo()`` in :meth:`remove`."""
        self._at_removal.append(undo)

    @property
    def forwards(self) -> int:
        """Outermost calls that came through; 0 after a step means that the model is compiled or was called in another way."""
        return self._frontier.forwards

    @property
    def decides_with_others(self) -> bool:
        """Whether ranks hold frozen weights in parts, so that all of them must run the same modules (Rule 8)."""
        return self._reuse.decides_with_others

    def report(self) -> str:
        """Plan and counters as a table; printed as well as returned."""
        text = render(self.plan, self.stats)
        print(text)
        return text

    def clear(self) -> None:
        """Forget every cached output, those in ``cache_dir`` too."""
        self.store.clear()
        self.stats.stored_samples = self.stats.stored_bytes = 0

    def kept_bytes_per_sample(self) -> float:
        """Bytes that are kept for a sample on the average, of all its outputs; 0.0 before the first."""
        return self._reuse.kept_bytes() / self.stats.misses if self.stats.misses else 0.0

    def room(self) -> str:
        """Where outputs are kept and how much room there is, for people."""
        return self.store.room()

    def wait_for_room(self) -> None:
        """Wait while the writer of a folder has more to do than it can hold: for hosts that would rather wait than lose an output."""
        self.store.wait_for_room()

    def epoch_ended(self, first: bool) -> None:
        """For hosts that know: samples that do not come back in a later epoch than the ``first`` are not kept any more (Rule 9)."""
        self._reuse.epoch_ended(first)

    def remove(self) -> nn.Module:
        """Give every module its own class back and return the model. Cached outputs are forgotten, but those in ``cache_dir`` stay.
        Calling it again changes nothing.

        Raises ``AttachError`` where another tool has derived classes of its own since, as ``fully_shard`` does; see :meth:`close`.
        """
        self._swap.undo()
        self.close()
        while self._at_removal:
            self._at_removal.pop()()
        return self._swap.root

    def close(self) -> None:
        """Write what waits to be written, and reuse nothing any more; frozen parts stay out of the graph."""
        self._reuse.stop('closed')
        if self._owns_store:
            self.store.close()
        self.stats.stored_samples = self.stats.stored_bytes = 0

    def _on_trace(self, trace: Trace) -> None:
        for warning in planner.unentered_towers(self._swap.root, trace):
            logger.warning(warning)
