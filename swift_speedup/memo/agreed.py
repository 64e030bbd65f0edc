"""The hot path where ranks hold weights in parts (Rule 8): every run of a frozen module is a collective, so every decision that leads
to one is made by all ranks: they take the least that any of them can do.

Everything else is :class:`Memo`'s. What all ranks must do alike is the number of times that modules run, not with how many samples.
"""
import time
from typing import Any, Optional

import torch

from ..errors import ShapeError
from ..ranks import Together
from ..trees import UnknownStructure, flatten
from .arguments import NotSplittable
from .chain import Call, Run, Step
from .compare import difference_alone
from .deferred import settled
from .fingerprint import Stale
from .key import NotKeyable
from .memo import Memo
from .value import Value, form_of

# What a rank can do with a call, and with a value that is used; the least of all ranks is done by all.
_STALE, _PLAINLY, _RUN, _PROMISE = 0, 1, 2, 3
_COMPUTE, _VERIFY, _COMPLETE, _FOUND = 0, 1, 2, 3


class AgreedMemo(Memo):
    """``together``: the ranks that decide. All of them call the same modules in the same order."""

    def __init__(self, *args: Any, together: Together, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._together = together
        self._runs = 0

    def evaluate(self, step: Step, run: Run, args: tuple, kwargs: dict, mode: bytes) -> Any:
        if self._thread.busy:
            return run(args, kwargs)
        while True:
            started = time.perf_counter()
            level, call, promised = self._possible(step, run, args, kwargs, mode)
            level = self._agree(level, f'call of {step.name}')
            self._stats.lookup_seconds += time.perf_counter() - started
            if level > _STALE:
                break
            step.fingerprint.refresh()
        if level == _PROMISE:
            return promised
        if level == _PLAINLY:
            self._stats.bypassed += 1
            return run(settled(args), settled(kwargs))
        return self._run_by_all(call)

    def _possible(self, step: Step, run: Run, args: tuple, kwargs: dict, mode: bytes) -> tuple[int, Optional[Call], Any]:
        """What this rank could do; nothing is run."""
        try:
            call = self._note(step, run, args, kwargs, self._learned.canonical(step, mode))
            if call is None:
                return _PLAINLY, None, None
            promised = self._promise(call)
            return (_RUN if promised is None else _PROMISE), call, promised
        except Stale:
            return _STALE, None, None
        except (NotSplittable, NotKeyable, UnknownStructure) as reason:
            step.refused = str(reason)
        except ShapeError:
            raise
        except Exception as trouble:  # Rule 7
            self._raise_if_own(trouble)
            step.refused = self._trouble(step, trouble)
        return _PLAINLY, None, None

    def _in_a_known_mode(self, call: Call) -> Call:
        return call  # comparing modes takes runs, and other ranks may know already

    def _learnt_from_some(self, call: Call, marks: Any) -> bool:
        return False

    def _run_by_all(self, call: Call) -> Any:
        """As it came, on all ranks; what it answers is noted where all could do so."""
        output = call.run_whole()
        structure = leaves = specs = None
        try:
            structure, leaves = flatten(output)
            specs = [(call.layout.spec(leaf), *form_of(leaf)) for leaf in leaves]
            refusal = call.step.purity.refusal(call.mode) or self._grown(call, leaves)
        except (NotSplittable, UnknownStructure) as reason:
            refusal = str(reason)
        if refusal is not None:
            self._refuse(call, refusal)
        if not self._agree(int(refusal is None), f'outputs of {call.step.name}'):
            return output
        call.outputs = leaves
        self._learned.set_outputs(call, call.shape_marks(), structure, specs)
        return self._answer(call, structure, specs)

    def _settle(self, value: Value) -> torch.Tensor:
        name = value.call.step.name
        level, parts, source = self._findable(value)
        level = self._agree(level, f'value of {name}')
        if level == _FOUND and value.whole() is None:
            return self._joined(value, parts, source)
        if level == _COMPUTE:
            return value.known_or_computed()
        if level == _VERIFY:
            return self._verify_by_all(value)
        whole = value.whole()  # on all ranks or on none: they run alike
        if whole is None:
            return self._completed(value, parts, source)
        self._keep(value, dict(enumerate(value.layout.cut(value.spec, whole, range(len(value.layout))))))
        return whole

    def _completed(self, value: Value, parts: dict, source: dict) -> torch.Tensor:
        """Each rank runs what it misses; one that misses nothing runs its smallest sample."""
        missing = set(source.values())
        wanted = sorted(missing) or [min(range(len(value.layout)), key=value.layout.sizes.__getitem__)]
        runs = self._runs
        try:
            computed = value.parts(wanted)
        except NotSplittable:
            if self._runs > runs:
                raise ShapeError(f'{value.call.step.name}: an output of some of the samples cannot be taken apart; train with '
                                 'cache=off (--frozen_cache off), and report it') from None
            return value.known_or_computed()
        finally:
            self._forget(value)
        parts.update({index: part for index, part in computed.items() if index in missing})
        self._keep(value, {index: parts[index] for index in missing})
        return self._joined(value, parts, source)

    def _findable(self, value: Value) -> tuple[int, dict, dict]:
        """What this rank could do for a value that is used now, with its stored parts and what stands for the others."""
        try:
            if value.trail in self._refused or any(call.step.purity.refusal(call.mode) for call in value.call.calls()):
                return _COMPUTE, {}, {}
            if not self._learned.verified(value):
                return _VERIFY, {}, {}
            parts, source = self._stored(value)
            return (_COMPLETE if source else _FOUND), parts, source
        except Exception as trouble:
            self._trouble(value.call.step, trouble)
            return _COMPUTE, {}, {}

    def _joined(self, value: Value, parts: dict, source: dict) -> torch.Tensor:
        try:
            return self._join(value, parts, source)
        except NotSplittable as reason:  # running it now would be a collective of this rank alone
            raise ShapeError(f'{value.call.step.name}: {reason}; train with cache=off (--frozen_cache off), and report it') from reason

    def _verify_by_all(self, value: Value) -> torch.Tensor:
        """As :meth:`Memo._verify`, with as many runs on ranks that know already."""
        real, parts, refusal = value.known_or_computed(), None, None
        call = value.call
        self._forget(value)
        try:
            parts = value.layout.cut(value.spec, real, range(len(value.layout)))
        except NotSplittable as reason:
            refusal = str(reason)
        if self._agree(int(refusal is None), f'samples of {call.step.name}'):
            refusal = self._difference(value, parts)
        elif refusal is None:
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

    def _difference(self, value: Value, parts: list) -> Optional[str]:
        runs = self._runs
        try:
            with self._checking(value.call):
                return difference_alone(value, parts)
        except NotSplittable as reason:
            if self._runs == runs:  # the others run
                value.rows(range(len(value.layout)))
            return str(reason)
        finally:
            self._forget(value)

    def _forget(self, value: Value) -> None:
        """Whether a run is spared because its samples were just run must not depend on which they were."""
        for call in value.call.calls():
            call.forget()

    def _execute(self, *args: Any) -> Any:
        self._runs += 1
        return super()._execute(*args)

    def _compare(self, *args: Any) -> None:
        """Auditing takes runs of this rank alone: it is left out."""

    def _agree(self, level: int, what: str) -> int:
        return self._together.smallest(level, what)
