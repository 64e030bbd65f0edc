"""Modules and their frozen calls -> steps of the memo: which calls may be looked up, and why others may not."""
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Optional

from torch import nn

from ..config import SpeedupConfig
from ..graph.frontier import is_frozen
from ..graph.swap import CALL
from ..memo import split
from ..memo.agreed import AgreedMemo
from ..memo.chain import Step
from ..memo.cost import Cost
from ..memo.deferred import Deferred, settled
from ..memo.fingerprint import Fingerprint, SharedFingerprint
from ..memo.memo import Memo
from ..ranks import Together, brought_together, is_fsdp1, is_sharded, several, units_around
from ..stats import Stats
from ..store import Store
from . import capture, state
from .gate import Gate, active_randomness, static_refusal
from .planner import NO_MEMO
from .structure import method_signature


class Reuse:
    """``evaluate`` answers for the frontier. ``kinds`` says how the calls of modules are taken apart; see ``memo.chain.Step``.
    ``twin``: of another model that runs beside this one and may have parts in common with it."""

    def __init__(self, names: Mapping[nn.Module, str], config: SpeedupConfig, stats: Stats, store: Store,
                 kinds: Mapping[nn.Module, str], twin: Optional['Reuse'] = None):
        self._names = names
        self._twin = twin
        self._config = config
        self._kinds = {module: kind for module, kind in kinds.items() if kind == 'media' or (
            config.cache != 'off' and (kind != 'tokens' or config.prefix != 'off'))}
        self._prefix = {module for module, kind in kinds.items() if kind == 'tokens'}
        self._off: Optional[str] = None  # why nothing can be reused
        self._active = config.cache != 'off' or config.dedup
        self._memo_options = store, stats, config.dedup, config.audit
        self._memo = Memo(*self._memo_options, beside=twin is not None)
        self._together: Optional[Together] = None  # the ranks that hold the weights in parts
        self._prepared = False  # a call has come: the model is as it will be trained
        self._sharded: Set[nn.Module] = frozenset()  # those that hold weights in parts
        self._units: Mapping[nn.Module, nn.Module] = {}  # see ``units_around``
        self._steps: dict[tuple[nn.Module, str], Step] = {}
        self._packing: dict[str, Sequence[int]] = {}  # path of a tower -> rows of each image in its present call

    def evaluate(self, module: nn.Module, entry: str, run: Callable, args: tuple, kwargs: dict) -> Any:
        if module not in self._names:  # a replica of another thread
            return run(args, kwargs)
        following = any(isinstance(value, Deferred) for value in (*args, *kwargs.values()))
        if module not in self._kinds and not following:
            return run(args, kwargs)
        with self._mode_of(module):
            if not self._prepared:
                self._prepare()
            if not self._active:
                return run(args, kwargs)
            if module in self._sharded and self._together is None:
                return run(settled(args), settled(kwargs))  # a collective: where the other ranks run it
            step = self._step(module, entry)
            if step.kind != 'media' and capture.needs_insides(module):
                step.refused = 'attention weights or states of layers inside it were asked for'
                return run(args, kwargs)
            if step.cost is not None and not following and not step.cost.worth_it():
                step.refused = step.cost.reason
                return run(args, kwargs)
            now = _Now(run, partial(self._mode_of, module), self._units.get(module))
            output = self._memo.evaluate(step, now.run, args, kwargs, step.purity.canonical(state.mode(module)))
            now.over = True
            if not now.ran:
                capture.tell(module, args, output)
            return output

    def _prepare(self) -> None:
        """At the first call, on all ranks: before it, parallel wrappers may not be there yet."""
        self._prepared = True
        root = next(iter(self._names))
        if is_fsdp1(root):
            self.stop('the first version of FSDP does not tell where weights are whole; use its second (fsdp2)')
        self._sharded = {module for module in self._names if several() and any(map(is_sharded, module.parameters()))}
        if not self._sharded.isdisjoint(self.frozen_kinds()):
            self._together = Together() if self._twin is None or self._twin._together is None else self._twin._together
            self._memo = AgreedMemo(*self._memo_options, beside=self._twin is not None, together=self._together)
            self._units = units_around(root)

    def frozen_kinds(self) -> list[nn.Module]:
        """The outermost modules that are reused and frozen now."""
        known: dict[nn.Module, bool] = {}
        found = [module for module in self._kinds if is_frozen(module, known)]
        inside = {part for module in found for part in module.modules() if part is not module}
        return [module for module in found if module not in inside]

    def stop(self, reason: str) -> None:
        """Reuse nothing from now on."""
        self._active, self._off = False, reason

    @property
    def decides_with_others(self) -> bool:
        return self._together is not None

    def refusal(self, module: nn.Module, path: str) -> Optional[str]:
        """Why the outputs of a frozen module are not reused now; ``None``: they are."""
        if self._config.cache == 'off' or self._off:
            return self._off or 'cache=off'
        with self._mode_of(module):
            steps = [step for (other, _), step in self._steps.items() if other is module]
            if not steps:
                if self._config.prefix == 'off' and module in self._prefix:
                    return 'prefix=off'
                return static_refusal(path, module, several()) or (None if module in self._kinds else NO_MEMO)
            mode = state.mode(module)
            reason = next((reason for step in steps for reason in (step.purity.refusal(mode), step.refused) if reason), None)
            inside = {other for (other, _), step in self._steps.items()
                      if self._names[other].startswith(f'{path}.') and step.refused is None and step.purity.modes()}
            return f'{reason}; {len(inside)} modules inside it are reused one by one' if reason and inside else reason

    def expected_refusal(self, module: nn.Module, path: str) -> Optional[str]:
        """As :meth:`refusal`, for a model whose weights are not loaded: what only running it can show is taken to be well."""
        if self._config.cache == 'off':
            return 'cache=off'
        with self._mode_of(module):
            return active_randomness(path, module)

    def remarks(self) -> list[str]:
        whole = [f'{step.name}: only whole calls that repeat are reused, because {step.note}' for step in self._steps.values()
                 if step.whole]
        return whole + [f'{name}: output {output} is kept, {size / count / 1024:,.1f} KiB per sample'
                        for (name, output), (count, size) in self._memo.kept_bytes.items() if count]

    def kept_bytes(self) -> int:
        """Of all that was stored since the beginning."""
        return sum(size for _, size in self._memo.kept_bytes.values())

    def kept(self) -> list[str]:
        """What the stored entries are: outputs of which modules."""
        return list(dict.fromkeys(name for (name, _), (count, _) in self._memo.kept_bytes.items() if count))

    def _step(self, module: nn.Module, entry: str) -> Step:
        step = self._steps.get((module, entry))
        if step is None:
            path = self._names[module] or '(root)'
            name, method = (path, 'forward') if entry == CALL else (f'{path}.{entry}', entry)
            gate = Gate(path, module, self._twin and self._twin.gate_like(module, path, entry), self._together is not None)
            shared = partial(SharedFingerprint, together=self._together) if self._together else Fingerprint
            step = self._steps[module, entry] = Step(
                name, method_signature(module, method), shared(lambda: state.settings(module), lambda: state.tensors(module)),
                gate, self._kinds.get(module, 'follower'), _causal(module), partial(self._rows_of_images, path), self._cost(module))
        return step

    def gate_like(self, other: nn.Module, path: str, entry: str) -> Optional[Gate]:
        """Of the segment of this model that is at the same place as ``other``, a module of another model, if both are built alike."""
        for (module, name), step in self._steps.items():
            if name == entry and self._names[module] == path and state.settings(module) == state.settings(other):
                return step.purity
        return None

    def _cost(self, module: nn.Module) -> Optional[Cost]:
        kind = self._kinds.get(module)
        # Clocks of several ranks do not agree.
        return None if kind is None or self._together is not None or (kind == 'tokens' and self._config.prefix == 'on') else Cost()

    def epoch_ended(self, first: bool) -> None:
        """Told by the trainer; ``first``: nothing can have come back yet."""
        for step in self._steps.values():
            if step.cost is not None:
                step.cost.epoch_ended(first)

    def entering(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A tower that is trained in part is called: its grid tells the blocks inside how many rows each image has."""
        if self._kinds.get(module) == 'media':
            self._packing[self._names[module]] = split.rows_of_images(method_signature(module, 'forward'), args, kwargs)

    def _rows_of_images(self, path: str) -> Sequence[int]:
        return next((rows for tower, rows in self._packing.items() if path.startswith(f'{tower}.')), ())

    def _mode_of(self, module: nn.Module) -> AbstractContextManager[None]:
        """The mode in which a frozen segment is evaluated."""
        return state.in_eval_mode(module) if self._config.eval else nullcontext()


class _Now:
    """The real call of a module: as part of the model's forward, or later, when its output is needed."""

    def __init__(self, run: Callable, mode: Callable[[], AbstractContextManager[None]], unit: Optional[nn.Module]):
        self.ran = False
        self.over = False  # the model's forward has gone on
        self._run = run
        self._mode = mode
        self._unit = unit

    def run(self, args: tuple, kwargs: dict) -> Any:
        if not self.over:
            self.ran = True
            return self._run(args, kwargs)
        with self._mode(), capture.suspended(), brought_together(self._unit):
            return self._run(args, kwargs)


def _causal(module: nn.Module) -> Optional[bool]:
    """What the attention inside does when there is no mask."""
    found = {part.is_causal for part in module.modules() if isinstance(getattr(part, 'is_causal', None), bool)}
    return found.pop() if len(found) == 1 else None
