"""What running calls has shown: the shapes of outputs, whose samples do not depend on their batch, which modes give the same.

Kept as notes beside the entries, so that another process is as far as this one was: it need run nothing to believe them. Notes are
found by digests that hold the fingerprint, as keys do, and are plain JSON: a note that does not fit what is asked is no note.
"""
import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch

from ..log import logger
from ..store import Store
from ..trees import Structure
from .chain import Call, Step
from .key import FORMAT_VERSION, Digest
from .value import Value

_SAME_DEVICE = 'as the input'
_ATOMS = (type(None), bool, int, float, str)
_REMEMBERED_ORIGINS = 64  # of the same segments
_CONTAINERS = {'dict': dict, 'OrderedDict': OrderedDict, 'tuple': tuple, 'list': list}


class Learned:
    """Facts of one attachment."""

    def __init__(self, store: Store, beside: bool = False):
        self._store = store
        self._beside = beside  # another model of this process uses the store too
        self._outputs: dict[tuple, tuple] = {}  # (form, mark) -> structure and specs
        # Trail of a value -> (smallest, largest sample) of batches in which a sample alone equalled its part of the batch.
        self._verified: dict[tuple, list[tuple[int, int]]] = {}
        self._asked: set[bytes] = set()  # notes that were looked for
        self._described: set[bytes] = set()
        self.rates: dict[tuple, float] = {}  # seconds per unit of work that computing a value took

    def outputs(self, call: Call, mark: Any) -> Optional[tuple]:
        """``(structure, specs)`` of a call's outputs, ``None`` when they are not known."""
        known = self._outputs.get((call.form, mark))
        if known is None:
            known = self._read(_outputs_key(call, mark), lambda note: (
                _structure_from(note['structure']), tuple(_spec_from(spec, call.device) for spec in note['specs'])))
            if known is not None:
                self._outputs[call.form, mark] = known
        return known

    def set_outputs(self, call: Call, marks: Sequence, structure: Structure, specs: Sequence[tuple]) -> None:
        for mark in dict.fromkeys(marks):
            self._outputs[call.form, mark] = structure, tuple(specs)
            plain = _structure_to(structure)
            if plain is not None:
                self._write(_outputs_key(call, mark), {
                    'structure': plain, 'specs': [_spec_to(spec, call.device) for spec in specs]})

    def knows(self, call: Call, mark: Any) -> bool:
        return (call.form, mark) in self._outputs

    def verified(self, value: Value) -> bool:
        """Whether samples were compared in a batch like this one. What a larger neighbour does to a sample, by padding, shows only in a
        batch that has both."""
        spreads = self._verified.get(value.trail)
        smallest, largest = value.layout.spread()
        if spreads is None or not any(low <= smallest and largest <= high for low, high in spreads):
            key = _value_key(value)
            if self._first_time(key):
                note = self._read(key, lambda note: ([(int(low), int(high)) for low, high in note['spreads']], float(note['seconds'])))
                if note is not None:
                    spreads = self._verified.setdefault(value.trail, [])
                    spreads += note[0]
                    self.set_rate(value, note[1])
                    for call in value.call.calls():  # who wrote the note has shown this too, perhaps after it was asked for here
                        call.step.purity.confirm(call.mode)
        return any(low <= smallest and largest <= high for low, high in spreads or ())

    def set_verified(self, value: Value) -> None:
        spreads = self._verified.setdefault(value.trail, [])
        spreads.append(value.layout.spread())
        self._write(_value_key(value), {'spreads': spreads, 'seconds': sum(call.seconds for call in value.call.calls())})

    def set_rate(self, value: Value, seconds: float) -> None:
        self.rates[value.trail] = seconds
        cost = value.call.root.step.cost
        if cost is not None:
            cost.expect(seconds)

    def recall(self, call: Call) -> None:
        """What another process has shown about the purity of the call's step."""
        purity = call.step.purity
        key = _call_key('pure', call)
        if not purity.verified(call.mode) and self._first_time(key):
            note = self._read(key, lambda note: note if isinstance(note, str) else note is True)
            if isinstance(note, str):
                purity.forbid(call.mode, note)
            elif note:
                purity.confirm(call.mode)

    def set_pure(self, call: Call) -> None:
        call.step.purity.confirm(call.mode)
        self._write(_call_key('pure', call), True)

    def set_impure(self, call: Call, reason: str) -> None:
        self._write(_call_key('pure', call), reason)

    def whole(self, call: Call) -> Optional[str]:
        """Why samples of the call cannot be told apart, if that was found."""
        key = _call_key('whole', call)
        return self._read(key, lambda note: str(note['reason'])) if self._first_time(key) else None

    def set_whole(self, call: Call, reason: str) -> None:
        self._write(_call_key('whole', call), {'reason': reason})

    def canonical(self, step: Step, mode: bytes) -> bytes:
        """The mode under which values of ``mode`` are kept."""
        if step.purity.verified(mode) or not self._first_time(Digest().add('step', step.name).add('mode', mode).value()):
            return mode
        found = self._read(_mode_key(step, mode), lambda note: bytes.fromhex(note['mode']))
        if found is None or len(found) != len(mode):
            return mode
        step.purity.share(mode, found)
        return found

    def set_same(self, call: Call, mode: bytes) -> None:
        call.step.purity.share(call.mode, mode)
        self._write(_mode_key(call.step, call.mode), {'mode': mode.hex()})

    def origin(self, value: Value) -> bytes:
        """16 bytes that name the segments, weights, settings and versions behind a value; a note under them says what they were."""
        calls = list(value.call.calls())
        origin = Digest().add('format', str(FORMAT_VERSION)).add('fingerprints', b''.join(call.fingerprint for call in calls)).value()
        if origin not in self._described:
            self._described.add(origin)
            about = {'format': FORMAT_VERSION, 'segments': {call.step.name: call.step.fingerprint.about() for call in reversed(calls)}}
            if self._store.get_note(origin) is None:
                self._tell_of_others(origin, about)
                self._write(origin, about)
        return origin

    def _tell_of_others(self, origin: bytes, about: Mapping) -> None:
        """Entries of the same segments that cannot be used: the user may have expected that they can."""
        key = Digest().add('note', 'origins').add('segments', repr(list(about['segments']))).value()
        others = self._read(key, lambda note: [bytes.fromhex(other) for other in note]) or []
        last = self._read(others[-1], lambda note: note) if others else None
        if isinstance(last, dict) and isinstance(last.get('segments'), dict):
            what = _what_differs(about, last)
            log = logger.debug if self._beside else logger.info  # the trained model's own entries, beside it, are no surprise
            log('%s: the cache has outputs from before, but they are not used: %s', ' + '.join(about['segments']),
                        '; '.join(what) or 'the inputs differ')
        self._write(key, [other.hex() for other in [*others, origin][-_REMEMBERED_ORIGINS:]])

    def _first_time(self, key: bytes) -> bool:
        first = key not in self._asked
        self._asked.add(key)
        return first

    def _read(self, key: bytes, parse: Any) -> Any:
        note = self._store.get_note(key)
        try:
            return None if note is None else parse(json.loads(note))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the folder may hold anything
            return None

    def _write(self, key: bytes, note: Any) -> None:
        self._store.put_note(key, json.dumps(note).encode())


def _what_differs(now: Mapping, then: Mapping) -> list[str]:
    found = [] if then.get('format') == now['format'] else [f'format {then.get("format")}, now {now["format"]}']
    for name, about in now['segments'].items():
        before = then['segments'].get(name)
        if not isinstance(before, dict):
            continue
        found += [f'other {what} of {name}' for what in ('weights', 'modules') if before.get(what) != about[what]]
        lines = before.get('settings')
        found += [f'{line}, now {new}' for line, new in zip(lines if isinstance(lines, list) else (), about['settings']) if line != new]
    return list(dict.fromkeys(found))


def _outputs_key(call: Call, mark: Any) -> bytes:
    return Digest().add('note', 'outputs').add('form', repr(call.form)).add('mark', repr(mark)).value()


def _value_key(value: Value) -> bytes:
    digest = Digest().add('note', 'verified').add('trail', repr(value.trail))
    for call in value.call.calls():
        digest.add('call', call.prefix)
    return digest.value()


def _call_key(kind: str, call: Call) -> bytes:
    return Digest().add('note', kind).add('call', call.prefix).value()


def _mode_key(step: Step, mode: bytes) -> bytes:
    return Digest().add('note', 'mode').add('step', step.name).add('fingerprint', step.fingerprint.current()).add('mode', mode).value()


def _structure_to(structure: Structure) -> Optional[dict]:
    """``None`` for what cannot be written down."""
    if structure.kind == 'leaf':
        return {'kind': 'leaf'}
    if structure.kind == 'atom':
        return {'kind': 'atom', 'value': structure.value} if isinstance(structure.value, _ATOMS) else None
    items = [_structure_to(item) for item in structure.items]
    if None in items or not all(isinstance(name, str) for name in structure.names):
        return None
    kind = structure.type
    named = kind.__name__ if kind in _CONTAINERS.values() else f'{kind.__module__}:{kind.__qualname__}'
    return {'kind': structure.kind, 'type': named, 'names': list(structure.names), 'items': items}


def _structure_from(note: Mapping) -> Structure:
    """Raises ``ValueError`` for a type that this process has not loaded itself: nothing is imported because a folder names it."""
    kind = note['kind']
    if kind == 'leaf':
        return Structure('leaf')
    if kind == 'atom':
        if not isinstance(note['value'], _ATOMS):
            raise ValueError(note)
        return Structure('atom', value=note['value'])
    items = tuple(_structure_from(item) for item in note['items'])
    names = tuple(str(name) for name in note['names'])
    found = _CONTAINERS.get(note['type']) if kind in ('dict', 'tuple', 'list') else _loaded_type(kind, note['type'])
    if found is None or len(names) != (len(items) if kind in ('dict', 'fields') else 0):
        raise ValueError(note)
    return Structure(kind, found, names, items)


def _loaded_type(kind: str, name: str) -> Optional[type]:
    module, _, path = name.partition(':')
    found: Any = sys.modules.get(module)
    for part in path.split('.'):
        found = vars(found).get(part) if found is not None else None
    if not isinstance(found, type):
        return None
    fits = dataclasses.is_dataclass(found) if kind == 'fields' else kind == 'namedtuple' and hasattr(found, '_fields')
    return found if fits else None


def _spec_to(spec: tuple, device: torch.device) -> list:
    layout, dtype, found, order = spec
    return [layout, str(dtype).removeprefix('torch.'), _SAME_DEVICE if found == device else str(found), order]


def _spec_from(note: list, device: torch.device) -> tuple:
    layout, dtype, found, order = note
    known = getattr(torch, dtype)
    if not isinstance(known, torch.dtype):
        raise ValueError(note)
    return _tuples(layout), known, device if found == _SAME_DEVICE else torch.device(found), _tuples(order)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
