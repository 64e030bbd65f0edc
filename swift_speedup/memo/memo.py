"""The hot path: keys -> hits | compute what is missing -> put -> one output, as the segment itself would have answered."""
import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional, Protocol

import torch

from ..log import warn_once
from ..stats import Stats
from ..store import Entry, Store
from ..trees import UnknownStructure, flatten, rebuild
from .fingerprint import Fingerprint
from .key import NotKeyable, call_prefix, sample_key
from .split import Call, NotSplittable, PackedGrid

Run = Callable[[tuple, dict], Any]

# Kernels may order sums by the shape of the batch; a sample alone must equal its rows in the batch within this share of the
# largest value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class Purity(Protocol):
    """Whether a segment may be reused (Rule 4), by train/eval mode."""

    def refusal(self, mode: bytes) -> Optional[str]: ...
    def verified(self, mode: bytes) -> bool: ...
    def confirm(self, mode: bytes) -> None: ...
    def forbid(self, mode: bytes, reason: str) -> None: ...
    def observe(self, mode: bytes) -> AbstractContextManager[None]: ...
    def preserved(self) -> AbstractContextManager[None]: ...


@dataclasses.dataclass
class _Lookup:
    """``source[i]`` is the sample computed in place of sample ``i``, for those without an entry."""

    batch: PackedGrid
    keys: list[bytes]
    entries: list[Optional[Entry]]
    source: dict[int, int]

    @property
    def computed(self) -> list[int]:
        return sorted(set(self.source.values()))


class Memo:
    """Reuse of one segment per sample. ``name`` is its path, ``signature`` that of its class's ``forward`` without ``self``."""

    def __init__(self, name: str, signature: inspect.Signature, fingerprint: Fingerprint, purity: Purity, store: Store,
                 stats: Stats, dedup: bool):
        self.name = name
        self.bypass_reason: Optional[str] = None
        self._signature = signature
        self._fingerprint = fingerprint
        self._purity = purity
        self._store = store
        self._stats = stats
        self._dedup = dedup
        self._seconds_per_row: Optional[float] = None

    def evaluate(self, run: Run, args: tuple, kwargs: dict, mode: bytes) -> Any:
        """The output of ``run(args, kwargs)``, evaluating only what has no entry yet. ``mode`` names the train/eval state."""
        refusal = self._purity.refusal(mode)
        lookup = None
        if refusal is None:
            started = time.perf_counter()
            try:
                lookup = self._look_up(args, kwargs, mode)
            except (NotSplittable, NotKeyable) as reason:
                refusal = str(reason)
            except Exception as trouble:  # Rule 7: any cache trouble is a miss
                refusal = self._trouble(trouble)
            self._stats.lookup_seconds += time.perf_counter() - started
        if lookup is None:
            self._stats.bypassed += 1
            self.bypass_reason = refusal
            return run(args, kwargs)
        self.bypass_reason = None
        if not lookup.source:
            return self._serve(lookup, run, args, kwargs)
        if self._purity.verified(mode):
            return self._compute_missing(lookup, run, mode)
        return self._compute_first(lookup, run, mode)

    def _look_up(self, args: tuple, kwargs: dict, mode: bytes) -> _Lookup:
        batch = PackedGrid.of(Call(self._signature, args, kwargs))
        samples = batch.samples()
        device_type = samples[0][batch.patches_name].device.type
        prefix = call_prefix(self._fingerprint.current(), type(batch).__name__, batch.context, mode, device_type)
        keys = [sample_key(prefix, sample) for sample in samples]
        entries = [self._store.get(key) for key in keys]
        source: dict[int, int] = {}
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if entries[index] is None:
                source[index] = first.setdefault(key, index) if self._dedup else index
        return _Lookup(batch, keys, entries, source)

    def _serve(self, lookup: _Lookup, run: Run, args: tuple, kwargs: dict) -> Any:
        started = time.perf_counter()
        try:
            output = self._assemble(lookup, {})
        except Exception as trouble:
            self._trouble(trouble)
            return self._timed(run, args, kwargs, sum(lookup.batch.rows))
        elapsed = time.perf_counter() - started
        self._stats.lookup_seconds += elapsed
        self._count(lookup)
        return output

    def _compute_missing(self, lookup: _Lookup, run: Run, mode: bytes) -> Any:
        computed = lookup.computed
        args, kwargs = lookup.batch.subset(computed)
        with self._purity.observe(mode):
            output = self._timed(run, args, kwargs, sum(lookup.batch.rows[index] for index in computed))
        self._count(lookup)
        refusal = self._purity.refusal(mode)
        whole = len(computed) == len(lookup.keys)
        if refusal is None:
            try:
                parts = self._keep(lookup, computed, output)
                return output if whole else self._assemble(lookup, parts)
            except (NotSplittable, UnknownStructure) as reason:
                self._purity.forbid(mode, str(reason))
            except Exception as trouble:
                self._trouble(trouble)
        # What was served so far came from a pure segment; this call did not, so it is answered by one real run of the whole call.
        return output if whole else run(lookup.batch.call.args, lookup.batch.call.kwargs)

    def _compute_first(self, lookup: _Lookup, run: Run, mode: bytes) -> Any:
        """The first computation in a mode: the whole call as it came, so that nothing changes if the segment proves impure."""
        batch = lookup.batch
        everything = list(range(len(batch.rows)))
        with self._purity.observe(mode):
            output = self._timed(run, batch.call.args, batch.call.kwargs, sum(batch.rows))
        lookup.source = {index: index for index in everything}
        lookup.entries = [None] * len(everything)
        self._count(lookup)
        if self._purity.refusal(mode) is not None:
            return output
        try:
            self._check_alone(lookup, run, output, mode)
            if self._purity.refusal(mode) is None:
                self._keep(lookup, everything, output)
                self._purity.confirm(mode)
        except (NotSplittable, UnknownStructure) as reason:
            self._purity.forbid(mode, str(reason))
        except Exception as trouble:  # a check that cannot be made is not tried again at every step
            self._purity.forbid(mode, self._trouble(trouble))
        return output

    def _check_alone(self, lookup: _Lookup, run: Run, output: Any, mode: bytes) -> None:
        """Evaluate the smallest sample once more and alone: it must come out as its rows in the batch did."""
        batch = lookup.batch
        chosen = min(range(len(batch.rows)), key=batch.rows.__getitem__)
        structure, leaves = flatten(output)
        expected = [batch.split_leaf(leaf, range(len(batch.rows)))[chosen] for leaf in leaves]
        self._stats.checks += 1
        with self._purity.preserved(), self._purity.observe(mode):
            structure_alone, alone = flatten(run(*batch.subset([chosen])))
        if structure_alone != structure:
            self._purity.forbid(mode, 'a sample evaluated alone gives an output of another structure than a batch')
        for number, (found, wanted) in enumerate(zip(alone, expected)):
            if not _close(found, wanted):
                self._purity.forbid(mode, f'output {number} of a sample evaluated again and alone differs from its rows in the batch')

    def _keep(self, lookup: _Lookup, computed: Sequence[int], output: Any) -> dict[int, Entry]:
        """Put the computed samples; returns their parts of ``output`` (views), by sample."""
        structure, leaves = flatten(output)
        columns = [lookup.batch.split_leaf(leaf, computed) for leaf in leaves]
        parts = {index: Entry(structure, tuple(column[place] for column in columns)) for place, index in enumerate(computed)}
        try:
            for index, part in parts.items():
                self._store.put(lookup.keys[index], _owned(part))
        except Exception as trouble:
            self._trouble(trouble)
        self._count_store()
        return parts

    def _assemble(self, lookup: _Lookup, parts: dict[int, Entry]) -> Any:
        entries = [entry if entry is not None else parts[lookup.source[index]] for index, entry in enumerate(lookup.entries)]
        structure = entries[0].structure
        if any(entry.structure != structure for entry in entries):
            raise ValueError('samples of one call have outputs of different structure')
        device = lookup.batch.call.values[lookup.batch.patches_name].device
        return rebuild(structure, [
            torch.cat([leaf.to(device, non_blocking=True) for leaf in column]) for column in zip(*(entry.leaves for entry in entries))])

    def _timed(self, run: Run, args: tuple, kwargs: dict, rows: int) -> Any:
        started = time.perf_counter()
        output = run(args, kwargs)
        elapsed = time.perf_counter() - started
        self._stats.frozen_calls += 1
        self._stats.frozen_seconds += elapsed
        self._seconds_per_row = elapsed / rows
        return output

    def _count(self, lookup: _Lookup) -> None:
        stats, rows = self._stats, lookup.batch.rows
        stats.hits += len(rows) - len(lookup.source)
        stats.misses += len(lookup.computed)
        stats.deduplicated += len(lookup.source) - len(lookup.computed)
        computed = set(lookup.computed)
        if self._seconds_per_row is not None:
            stats.saved_seconds += self._seconds_per_row * sum(count for index, count in enumerate(rows) if index not in computed)

    def _count_store(self) -> None:
        stats, store = self._stats, self._store
        stats.stored_samples, stats.stored_bytes, stats.evicted = len(store), store.nbytes, store.evicted

    def _trouble(self, trouble: Exception) -> str:
        self._stats.errors += 1
        reason = f'cache trouble: {type(trouble).__name__}: {trouble}'
        warn_once(f'{self.name}: {reason}; computing instead')
        return reason


def _owned(part: Entry) -> Entry:
    """Copies that share no storage with the batch they came from, on the CPU."""
    return Entry(part.structure, tuple(
        leaf.detach().to('cpu', copy=True, memory_format=torch.contiguous_format) for leaf in part.leaves))


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    noise = TOLERANCE.get(found.dtype, 0.0) * wanted.abs().max().double() if wanted.numel() else 0.0
    return bool(((found.double() - wanted.double()).abs() <= noise).all())
