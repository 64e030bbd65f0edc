"""Model, trace and refusals -> ``Plan``: every segment with what is done to it, and every tower to which nothing is done."""
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from torch import nn

from ..graph.frontier import is_frozen
from ..graph.swap import original_class
from ..ranks import full_shape
from .detect import Segment, expected_towers, segments_of
from .plan import Plan, SegmentPlan
from .remarks import freezing_remarks
from .structure import has_weights, trainable
from .trace import Trace

Refusal = Callable[[nn.Module, str], Optional[str]]  # (frozen module, path) -> why its outputs are not reused
NO_MEMO = 'its outputs are not reused'  # the refusal that says no more than that


def make_plan(root: nn.Module, trace: Optional[Trace], refusal: Refusal, left_alone: Sequence[str]) -> Plan:
    """``trace`` is ``None`` before the first training forward."""
    known: dict[nn.Module, bool] = {}
    frozen = [path for path, module in root.named_modules() if has_weights(module) and is_frozen(module, known)]
    executed = segments_of(root, trace) if trace is not None else []
    segments = [segment for segment in executed if all(is_frozen(module, known) for module in segment.modules)]
    passed = () if trace is None else _outermost([path for path in frozen if path in trace.passed])
    rows = [_row(part, refusal) for segment in segments for part in _parts(segment, refusal)]
    covered = {module for segment in segments for module in segment.modules}
    for tower, path in expected_towers(root).items():
        if tower not in covered:
            rows.append(_tower_row(tower, path, trace, passed, refusal))
    return Plan(tuple(rows), _outermost(frozen), passed, tuple(left_alone), tuple(freezing_remarks(root)), trace is not None)


def unentered_towers(root: nn.Module, trace: Trace) -> Iterator[str]:
    """Warnings: frozen towers that a step with pixels or sound did not enter as a whole."""
    known: dict[nn.Module, bool] = {}
    for tower, path in expected_towers(root).items():
        if not trace.media or tower in trace.entered or not is_frozen(tower, known):
            continue
        if any(part in trace.entered for part in tower.modules()):
            yield (f'{path} is frozen, but the first training step entered it by a method that swift_speedup does not know: its parts '
                   'leave the graph one by one, and its output is not reused. Add the method to swift_speedup/segments/entries.py')
        else:
            yield (f'{path} is frozen, but the first training step, which had pixels or sound, never entered it: nothing is skipped '
                   'or reused there. Either it is not used, or it is entered by a method that is missing in '
                   'swift_speedup/segments/entries.py')


def _parts(segment: Segment, refusal: Refusal) -> list[Segment]:
    """A tower and its aligner apart where only the tower's output is kept."""
    if segment.kind != 'tower + aligner':
        return [segment]
    reused = [refusal(module, path) is None for module, path in zip(segment.modules, segment.paths)]
    end = len(reused) - reused[::-1].index(True) if True in reused else len(reused)
    if end == len(reused):
        return [segment]
    return [segment.part('tower', 0, end), segment.part('aligner', end, None)]


def _row(segment: Segment, refusal: Refusal) -> SegmentPlan:
    reasons = [refusal(module, path) for module, path in zip(segment.modules, segment.paths)]
    reason = next((reason for reason in reasons if reason and reason is not NO_MEMO), segment.impure)
    if reason is None and all(each is NO_MEMO for each in reasons):  # what feeds a reused part is cheap
        reason = f'outputs of this kind ({segment.kind}) are not reused'
    return _plan_row(segment, True, True, reason)


def _tower_row(tower: nn.Module, path: str, trace: Optional[Trace], passed: Sequence[str], refusal: Refusal) -> SegmentPlan:
    """A tower that is no segment, or of which no forward is known yet."""
    segment = Segment('tower', path, (tower,), (path,))
    trained = trainable(tower)
    if trained:
        return _plan_row(segment, False, False, f'{path}.{trained[0][0]} is trainable'.lstrip('.'))
    if trace is None:
        return _row(segment, refusal)
    if path in passed:
        return _plan_row(segment, True, False, 'its inputs need gradients')
    return _plan_row(segment, True, True, 'the last traced training step did not enter it')


def _plan_row(segment: Segment, frozen: bool, skipped: bool, reason: Optional[str]) -> SegmentPlan:
    classes = dict.fromkeys(original_class(module).__qualname__ for module in segment.modules)
    tensors = {id(parameter): full_shape(parameter).numel() for module in segment.modules for parameter in module.parameters()}
    return SegmentPlan(segment.kind, segment.path, segment.paths, ', '.join(classes), sum(tensors.values()), frozen, skipped,
                       frozen and reason is None, reason)


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
