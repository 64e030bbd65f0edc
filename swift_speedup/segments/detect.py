"""Model and trace -> segments: frozen callables below the frontier that are run, skipped and reused as one."""
import dataclasses
import re
from collections.abc import Iterable
from typing import Optional

from torch import nn

from ..graph.swap import is_traced, original_class, swappable
from ..ranks import full_shape
from .entries import GRID_NAMES
from .structure import (
    find_encoders,
    find_stacks,
    find_towers,
    forward_signature,
    has_weights,
    input_embeddings,
    token_embeddings,
)
from .trace import Trace, Unit


@dataclasses.dataclass(frozen=True)
class Segment:
    """A segment as it was executed, or, before the first training forward, as it probably will be.

    ``kind``: ``tower``, ``tower + aligner``, ``partial tower``, ``aligner``, ``prefix``, ``text encoder`` or ``part``.
    """

    kind: str
    path: str
    modules: tuple[nn.Module, ...]
    paths: tuple[str, ...]
    impure: Optional[str] = None  # seen while it ran

    def part(self, kind: str, start: int, stop: Optional[int]) -> 'Segment':
        paths = self.paths[start:stop]
        return Segment(kind, _ranges(paths), self.modules[start:stop], paths, self.impure)


def packed_towers(root: nn.Module) -> dict[nn.Module, str]:
    """The outermost modules whose forward takes a grid; names and ``model_arch`` tables are not trusted."""
    towers: dict[nn.Module, str] = {}
    for path, module in root.named_modules():
        if any(path.startswith(f'{tower}.') or not tower for tower in towers.values()) or is_traced(module):
            continue
        if any(name in forward_signature(module).parameters for name in GRID_NAMES):
            towers[module] = path
    return towers


def expected_towers(root: nn.Module) -> dict[nn.Module, str]:
    """Towers as far as the module tree tells."""
    found = packed_towers(root)
    for module, path in find_towers(root).items():
        if not any(path == other or path.startswith(f'{other}.') for other in found.values()):
            found[module] = path
    return found


def reusable_kinds(root: nn.Module) -> dict[nn.Module, str]:
    """The modules whose outputs may be looked up from their inputs alone, and how their calls are taken apart; see ``memo.chain.Step``.

    Layers of a stack are worth it one by one where only some of the stack are frozen.
    """
    towers = expected_towers(root)
    kinds = {layer: 'tokens' for stack in find_stacks(root) for layer in stack.layers if has_weights(layer)}
    kinds |= {part: 'block' for tower in towers for part in tower.modules() if part in kinds}
    kinds |= dict.fromkeys(find_encoders(root), 'tokens')
    return kinds | dict.fromkeys(towers, 'media')


def segments_of(root: nn.Module, trace: Trace) -> list[Segment]:
    """The segments of an executed forward, in the order in which they began."""
    groups: dict[tuple[str, str], list[Unit]] = {}
    facts = _Facts(root, trace)
    for place, unit in enumerate(trace.units):
        if _multiplies(unit.module):
            groups.setdefault(facts.group(place), []).append(unit)
    return [facts.describe(*key, group) for key, group in groups.items()]


class _Facts:
    """Sorts the units of one trace into segments by what fed them and by where they lie."""

    def __init__(self, root: nn.Module, trace: Trace):
        self._trace = trace
        self._stacks = find_stacks(root)
        self._encoders = find_encoders(root)
        embeddings = token_embeddings(root)
        self._text = {place for place, unit in enumerate(trace.units) if not embeddings.isdisjoint(unit.module.modules())}
        for place, unit in enumerate(trace.units):  # in the order of execution: what they reached
            if unit.sources & self._text:
                self._text.add(place)

    def group(self, place: int) -> tuple[str, str]:
        unit = self._trace.units[place]
        encoder = next((path for path in self._encoders.values() if unit.path.startswith(f'{path}.')), None)
        if place in self._text:
            if self._holds_stack(unit):
                return 'text encoder', unit.path
            stack = next((stack.path for stack in self._stacks if unit.path.startswith(f'{stack.path}.')), None)
            return ('prefix', stack) if stack is not None else ('part', '')
        if encoder is not None:
            return 'partial tower', encoder
        if unit.media or unit.sources:
            return 'media', str(min(self._first(place)))
        return 'part', unit.path.rpartition('.')[0]

    def describe(self, kind: str, where: str, group: list[Unit]) -> Segment:
        if kind == 'partial tower':
            return _segment(kind, f'{where}: {_ranges(unit.path[len(where) + 1:] for unit in group)}', group)
        if kind == 'media':
            towers = sum(self._holds_stack(unit) for unit in group)
            kind = 'aligner' if not towers else 'tower' if towers == len(group) else 'tower + aligner'
        return _segment(kind, _ranges(unit.path for unit in group), group)

    def _first(self, place: int) -> set[int]:
        """The units from which data reached this one first; itself if there are none."""
        sources = {source for source in self._trace.units[place].sources if source < place}
        return set().union(*(self._first(source) for source in sources)) or {place}

    def _holds_stack(self, unit: Unit) -> bool:
        return any(stack.path == unit.path or stack.path.startswith(f'{unit.path}.') for stack in self._stacks)


def _multiplies(module: nn.Module) -> bool:
    """Whether there is work to save: embeddings are lookups, norms cost next to nothing, of a bare layer autograd keeps nothing."""
    weights = (parameter for part in module.modules() if not isinstance(part, nn.Embedding)
               for parameter in part.parameters(recurse=False))
    return next(module.children(), None) is not None and any(len(full_shape(weight)) > 1 for weight in weights)


def _segment(kind: str, path: str, group: list[Unit]) -> Segment:
    return Segment(kind, path, tuple(unit.module for unit in group), tuple(unit.path for unit in group),
                   next((f'{unit.path}: {unit.impure}' for unit in group if unit.impure), None))


def _ranges(paths: Iterable[str]) -> str:
    """``layers.0-3 + norm`` for the paths of consecutive layers and others."""
    shown: list[str] = []
    for path in paths:
        match = re.match(r'(.*?)\.?(\d+)$', path)
        last = re.match(r'(.*?)\.?(\d+)(?:-(\d+))?$', shown[-1]) if shown else None
        if match and last and match.group(1) == last.group(1) and int(match.group(2)) == int(last.group(3) or last.group(2)) + 1:
            shown[-1] = f'{last.group(1)}.{last.group(2)}-{match.group(2)}'.lstrip('.')
        else:
            shown.append(path)
    return ' + '.join(shown)


def modules_to_swap(root: nn.Module) -> list[nn.Module]:
    """The modules whose calls the frontier must see.

    Those with weights and parts; of the leaves only embeddings and others that a hook could make require grad: for a bare
    layer without inputs that need grad autograd records nothing by itself. One class is swapped for all its instances or not at all.
    """
    entries = {input_embeddings(module) for module in root.modules()}
    wanted = {original_class(module) for module in root.modules()
              if _has_parts(module) or module in entries or isinstance(module, nn.Embedding) or module._forward_hooks}
    wanted.add(original_class(root))
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return [module for module in root.modules()
            if original_class(module) in wanted and not isinstance(module, containers) and swappable(module)]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and has_weights(module)
