"""The hot path: frozen calls are noted down; where an output is used, keys -> hits | compute what is missing -> put -> one tensor.

Knows calls, values and entries; knows no modules and no storage.
"""
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch

from ..errors import AuditError, ShapeError
from ..log import warn_once
from ..stats import Stats
from ..store import Entry, Store
from ..trees import UnknownStructure, flatten, rebuild
from .arguments import Arguments, NotSplittable
from .chain import Call, Run, Step
from .compare import close, difference_alone, difference_text
from .deferred import Deferred
from .key import NotKeyable
from .layout import Single
from .learned import Learned
from .outcomes import Outcomes
from .split import layout_of
from .value import Leaf, Value, form_of

_REMEMBERED = 1 << 20  # samples
_GROWTH = 8  # a step that goes on from a value and makes it larger than so many times: logits are not worth their bytes


class _Thread(threading.local):
    busy = False  # a step is really running: nothing inside it is looked up
    checking = False  # and that only proves something
    error: Optional[BaseException] = None  # raised by a step itself


class Memo:
    """Reuse of all segments of one attachment."""

    def __init__(self, store: Store, stats: Stats, dedup: bool, audit: float = 0.0, beside: bool = False):
        self._store = store
        self._audit = audit
        self._random = random.Random(0)  # its own: training's generators are not touched
        self._stats = stats
        self._dedup = dedup
        self._thread = _Thread()
        self._learned = Learned(store, beside)
        self._outcomes = Outcomes(stats)
        self._refused: set[tuple] = set()
        self._compared: set[tuple[str, bytes]] = set()  # steps and modes that were held against a known mode
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # the last samples that were stored: they are probably still there
        self.kept_bytes: dict[tuple[str, str], list[int]] = {}  # (step, its output) -> number and bytes of samples that were stored

    def evaluate(self, step: Step, run: Run, args: tuple, kwargs: dict, mode: bytes) -> Any:
        """The output of ``run(args, kwargs)``; its tensors are computed, or looked up, when they are used.

        ``mode`` names the train/eval state.
        """
        if self._thread.busy:
            return run(args, kwargs)
        started = time.perf_counter()
        promised = call = None
        try:
            call = self._note(step, run, args, kwargs, self._learned.canonical(step, mode))
            promised = call and self._promise(call)
        except (NotSplittable, NotKeyable, UnknownStructure) as reason:
            step.refused, call = str(reason), None
        except ShapeError:
            raise
        except Exception as trouble:  # Rule 7: any cache trouble is a miss
            self._raise_if_own(trouble)
            step.refused, call = self._trouble(step, trouble), None
        elapsed = time.perf_counter() - started
        self._stats.lookup_seconds += elapsed
        if call is not None:
            call.root.lookup_seconds += elapsed
        if call is None:
            self._stats.bypassed += 1
            return run(args, kwargs)
        step.refused = None
        return promised if promised is not None else self._run_first(call)

    def _note(self, step: Step, run: Run, args: tuple, kwargs: dict, mode: bytes) -> Optional[Call]:
        step.refused = step.purity.refusal(mode)
        if step.refused is not None:
            return None
        arguments = Arguments.of(step.signature, args, kwargs)
        parents = {place: tensor.value for place, tensor in enumerate(arguments.tensors) if isinstance(tensor, Deferred)}
        layouts = {id(value.layout): value.layout for value in parents.values()}
        if len(layouts) == 1:
            return self._recalled(Call(step, run, arguments, *layouts.values(), parents, mode, self._execute))
        if step.kind == 'follower':
            raise NotSplittable('its inputs belong to different batches')
        if parents:
            tensors = [tensor.value.real() if isinstance(tensor, Deferred) else tensor for tensor in arguments.tensors]
            arguments = Arguments.of(step.signature, *arguments.with_tensors(tensors))
        try:
            layout = layout_of(arguments, 'whole' if step.whole else step.kind, step.causal, step.packing())
        except NotSplittable:
            if step.kind != 'media' or not arguments.tensors:
                raise
            layout = Single()
        call = Call(step, run, arguments, layout, {}, mode, self._execute)
        if step.kind == 'media' and not step.whole:
            step.note = self._learned.whole(call)
            step.whole = step.note is not None
            if step.whole:
                call = Call(step, run, arguments, Single(), {}, mode, self._execute)
        return self._recalled(call)

    def _recalled(self, call: Call) -> Optional[Call]:
        self._learned.recall(call)
        call = self._in_a_known_mode(call)
        call.step.refused = call.step.purity.refusal(call.mode)
        return call if call.step.refused is None else None

    def _in_a_known_mode(self, call: Call) -> Call:
        """Training and evaluation share entries of what gives the same bits in both modes: two samples show it."""
        purity = call.step.purity
        known = [] if purity.verified(call.mode) else sorted(mode for mode in purity.modes() if mode != call.mode)
        if not known or (call.step.name, call.mode) in self._compared or purity.refusal(call.mode) is not None:
            return call
        self._compared.add((call.step.name, call.mode))
        samples = sorted(range(len(call.layout)), key=call.layout.sizes.__getitem__)[:2]
        try:
            with self._checking(call):
                indices = call.layout.closure(sorted(samples))
                found = flatten(call.answer(indices))[1]
                with purity.switched(known[0]):
                    wanted = flatten(call.answer(indices))[1]
        except Exception as trouble:  # it may not be made to run in that mode
            self._thread.error = None
            self._trouble(call.step, trouble)
            return call
        finally:
            call.forget()
        if purity.refusal(call.mode) is not None or len(found) != len(wanted) or not all(map(torch.equal, found, wanted)):
            return call
        self._learned.set_same(call, known[0])
        return call.in_mode(known[0])

    def _promise(self, call: Call) -> Any:
        """Outputs without running anything; ``None`` when their shapes are not known or nothing is proved yet."""
        if not call.step.purity.verified(call.mode):
            return None
        marks = call.shape_marks()
        outputs = {self._learned.outputs(call, mark) for mark in marks}
        if None in outputs and self._learnt_from_some(call, marks):
            outputs = {self._learned.outputs(call, mark) for mark in marks}
        return self._answer(call, *outputs.pop()) if len(outputs) == 1 and None not in outputs else None

    def _learnt_from_some(self, call: Call, marks: Sequence) -> bool:
        """Learn what outputs look like from running the samples that will be missed anyway, if those are not all."""
        first = {key: index for index, key in reversed(list(enumerate(call.keys)))} if self._dedup else {}
        wanted = [index for index, key in enumerate(call.keys) if first.get(key, index) == index and not (
            self._learned.knows(call, marks[index]) and call.root.keys[index] in self._kept)]
        indices = call.layout.closure(wanted)
        layout = call.layout.only(indices) if 0 < len(indices) < len(call.layout) else None
        if layout is None:
            return False
        structure, leaves = flatten(call.answer(indices))
        specs = [(layout.spec(leaf), *form_of(leaf)) for leaf in leaves]
        self._learned.set_outputs(call, [marks[index] for index in indices], structure, specs)
        return True

    def _answer(self, call: Call, structure: Any, leaves: Sequence[tuple]) -> Any:
        return rebuild(structure, [Deferred(Leaf(call, number, *leaf, self._settle)) for number, leaf in enumerate(leaves)])

    def _run_first(self, call: Call) -> Any:
        """The whole call as it came, so that nothing changes if the segment proves impure."""
        step, mode = call.step, call.mode
        output = call.run_whole()
        impure = step.purity.refusal(mode)
        if impure is not None:
            self._learned.set_impure(call, impure)
            return output
        try:
            structure, leaves = flatten(output)
            specs = [(call.layout.spec(leaf), *form_of(leaf)) for leaf in leaves]
        except (NotSplittable, UnknownStructure) as reason:
            self._refuse(call, str(reason))
            return output
        grown = self._grown(call, leaves)
        if grown is not None:
            self._refuse(call, grown)
            return output
        call.outputs = leaves
        self._learned.set_outputs(call, call.shape_marks(), structure, specs)
        return self._answer(call, structure, specs)

    def _grown(self, call: Call, leaves: Sequence[torch.Tensor]) -> Optional[str]:
        size = sum(leaf.nbytes for leaf in leaves)
        return (f'its outputs, {size} bytes, are more than {_GROWTH} times as large as its inputs, which are kept'
                if call.root is not call and size > _GROWTH * call.input_bytes() else None)

    def _settle(self, value: Value) -> torch.Tensor:
        """The real tensor behind ``value``."""
        if value.trail in self._refused or any(call.step.purity.refusal(call.mode) for call in value.call.calls()):
            return value.known_or_computed()
        try:
            if not self._learned.verified(value):
                return self._verify(value)
            whole = value.whole()
            if whole is None:
                return self._timed_look_up(value)
            self._keep(value, dict(enumerate(value.layout.cut(value.spec, whole, range(len(value.layout))))))
            return whole
        except NotSplittable as reason:
            self._refuse(value.call, str(reason), value)
        except (AuditError, ShapeError):
            raise
        except Exception as trouble:
            self._raise_if_own(trouble)
            self._trouble(value.call.step, trouble)
        return value.known_or_computed()

    def _verify(self, value: Value) -> torch.Tensor:
        """The first use of a value: its smallest sample, evaluated once more and alone, must come out as in the batch."""
        real = value.known_or_computed()
        call, layout = value.call, value.layout
        try:
            parts = layout.cut(value.spec, real, range(len(layout)))
            with self._checking(call):
                refusal = difference_alone(value, parts)
        except NotSplittable as reason:
            refusal = str(reason)
        except Exception as trouble:  # a check that cannot be made is not tried again at every step
            call.step.purity.forbid(call.mode, self._trouble(call.step, trouble))
            return real
        refusal = next((found for found in (each.step.purity.refusal(each.mode) for each in call.calls()) if found), refusal)
        if refusal is not None:
            self._refuse(call, refusal, value)
            return real
        self._learned.set_verified(value)
        for each in call.calls():
            self._learned.set_pure(each)
        self._keep(value, dict(enumerate(parts)))
        return real

    def _timed_look_up(self, value: Value) -> torch.Tensor:
        stats, root = self._stats, value.call.root
        started, computing = time.perf_counter(), stats.frozen_seconds
        real = self._look_up(value)
        computing = stats.frozen_seconds - computing
        elapsed = time.perf_counter() - started - computing
        stats.lookup_seconds += elapsed
        if root.step.cost is not None and root.device.type == 'cpu':  # elsewhere the host's clock does not tell what computing takes
            sizes = root.layout.sizes
            computed = sum(size for size, outcome in zip(sizes, root.outcome) if outcome == 'misses')
            root.step.cost.record(*((0, 0) if root.recorded else (sum(sizes), computed)), computing, elapsed + root.lookup_seconds)
            if not root.recorded:
                root.step.cost.count(len(sizes), sum(outcome != 'misses' for outcome in root.outcome))
            root.recorded, root.lookup_seconds = True, 0.0
        return real

    def _look_up(self, value: Value) -> torch.Tensor:
        parts, source = self._stored(value)
        missing = sorted(set(source.values()))
        if len(missing) == len(value.layout):  # nothing to put together, and padding stays as it was computed
            real = value.known_or_computed()
            self._keep(value, dict(enumerate(value.layout.cut(value.spec, real, missing))))
            return real
        if missing:
            parts.update(value.parts(missing))
            self._keep(value, {index: parts[index] for index in missing})
        return self._join(value, parts, source)

    def _join(self, value: Value, parts: Mapping[int, torch.Tensor], source: Mapping[int, int]) -> torch.Tensor:
        """One tensor of what was found and what was computed; ``source``: which sample stands for one that was not found."""
        device = value.device
        ordered = [parts[source.get(index, index)].to(device, non_blocking=True) for index in range(len(value.layout))]
        real = value.layout.join(value.spec, ordered, value.empty())
        if tuple(real.shape) != value.shape or real.dtype != value.dtype:
            raise NotSplittable(f'parts make up {real.dtype} {tuple(real.shape)}, expected {value.dtype} {value.shape}')
        self._outcomes.count(value, source, self._learned.rates.get(value.trail, 0.0))
        if self._audit:
            self._compare(value, parts, [index for index in range(len(value.layout)) if index not in source])
        return real

    def _compare(self, value: Value, parts: Mapping[int, torch.Tensor], hits: Sequence[int]) -> None:
        """Compute a share of the hits and compare."""
        chosen = [index for index in hits if self._random.random() < self._audit]
        if not chosen:
            return
        with self._checking(value.call):
            computed = value.parts(chosen)
        for index in chosen:
            found, wanted = parts[index], computed[index].cpu()
            self._stats.audited += 1
            if not close(found, wanted):
                self._refuse(value.call, 'a stored output differed from the computed one', value, whole=False)
                raise AuditError(difference_text(value, index, found, wanted))

    def _stored(self, value: Value) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
        """Stored parts by sample, and for each other sample the one to compute in its place."""
        parts: dict[int, torch.Tensor] = {}
        source: dict[int, int] = {}
        first: dict[bytes, int] = {}
        for index, key in enumerate(value.keys):
            entry = self._get(value, key)
            if entry is not None:
                parts[index] = entry.tensor
            else:
                source[index] = first.setdefault(key, index) if self._dedup else index
        return parts, source

    def _get(self, value: Value, key: bytes) -> Optional[Entry]:
        try:
            return self._store.get(key)
        except Exception as trouble:
            self._trouble(value.call.step, trouble)
            return None

    def _keep(self, value: Value, parts: Mapping[int, torch.Tensor]) -> None:
        if not self._store.keeps:
            return
        self._learned.rates[value.trail] = sum(call.seconds for call in value.call.calls())
        origin = self._learned.origin(value)
        counted = self.kept_bytes.setdefault((value.call.step.name, value.text), [0, 0])
        try:
            for index, part in parts.items():
                self._store.put(value.keys[index], Entry(_owned(part), origin, value.call.root.sample(index)))
                self._kept[value.call.root.keys[index]] = None
                counted[0] += 1
                counted[1] += part.nbytes
        except Exception as trouble:
            self._trouble(value.call.step, trouble)
        while len(self._kept) > _REMEMBERED:
            self._kept.popitem(last=False)
        stats, store = self._stats, self._store
        stats.stored_samples, stats.stored_bytes, stats.evicted = len(store), store.nbytes, store.evicted
        stats.queue_drops, stats.store_errors = store.dropped, store.errors

    def _execute(self, call: Call, indices: Sequence[int], args: tuple, kwargs: dict) -> Any:
        """Really run a call with some of its samples."""
        thread, outer = self._thread, self._thread.busy
        started = time.perf_counter()
        thread.busy = True
        try:
            with torch.no_grad(), call.autocast.again(), call.step.purity.observe(call.mode):
                output = call.run(args, kwargs)
        except Exception as error:
            thread.error = error
            raise
        finally:
            thread.busy = outer
        elapsed = time.perf_counter() - started
        if call.root is call and thread.checking:
            self._stats.checks += 1
        elif not thread.checking:
            self._stats.frozen_calls += call.root is call
            self._stats.frozen_seconds += elapsed
            call.seconds = elapsed / max(1, sum(call.layout.sizes[index] for index in indices))
            if call.root is call:
                self._outcomes.mark(call, dict.fromkeys(indices, 'misses'))
        return output

    @contextmanager
    def _checking(self, call: Call) -> Iterator[None]:
        self._thread.checking = True
        try:
            with call.step.purity.preserved():
                yield
        finally:
            self._thread.checking = False

    def _refuse(self, call: Call, reason: str, value: Optional[Value] = None, whole: bool = True) -> None:
        """Outputs of ``call`` cannot be taken apart: the whole call is one sample from now on, or it is not reused at all."""
        if value is not None:
            self._refused.add(value.trail)
        step = call.step
        if whole and call.root is call and step.kind == 'media' and not step.whole and step.purity.refusal(call.mode) is None:
            step.whole, step.note = True, reason
            self._learned.set_whole(call, reason)
        else:
            step.purity.forbid(call.mode, reason)

    def _raise_if_own(self, error: Exception) -> None:
        """The segment's own errors pass through."""
        if error is self._thread.error:
            self._thread.error = None
            raise error

    def _trouble(self, step: Step, trouble: Exception) -> str:
        self._stats.errors += 1
        reason = f'cache trouble: {type(trouble).__name__}: {trouble}'
        warn_once(f'{step.name}: {reason}; computing instead')
        return reason


def _owned(part: torch.Tensor) -> torch.Tensor:
    """A copy that shares no storage with the batch it came from, on the CPU, that can be trained on."""
    with torch.inference_mode(False), torch.no_grad():
        return part.detach().to('cpu', copy=True, memory_format=torch.contiguous_format)
