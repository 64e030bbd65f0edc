"""What is skipped, what is reused and why not: data for programs, a table for people (Rule 11)."""
import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

from rich.console import Console
from rich.table import Column, Table

from ..stats import Stats
from .flops import Prediction


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """One segment, or one tower that is none, as it stands now."""

    kind: str  # see ``detect.Segment``
    path: str  # for people: ``model.layers.0-3``
    modules: tuple[str, ...]  # their paths
    class_name: str
    parameters: int  # number of weights
    frozen: bool
    graph_skipped: bool  # before the first training forward: expected
    cached: bool
    reason: Optional[str]  # why it is not skipped or not cached; None when it is both

    def summary(self) -> str:
        name = f'{self.path or "the model"} ({self.kind}, {self.class_name})'
        if self.cached:
            return f'{name}: graph skipped, outputs reused'
        done = 'graph skipped, not cached' if self.graph_skipped else 'left as it is'
        return f'{name}: {done}: {self.reason}'


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the plugin does to a model now."""

    segments: tuple[SegmentPlan, ...]
    frozen_modules: tuple[str, ...]  # outermost frozen modules: the graph rules apply wherever their inputs need no grad
    kept: tuple[str, ...]  # frozen, but gradients had to pass through them in the last traced training forward
    left_alone: tuple[str, ...]  # parents that checkpoint their layers by hand
    remarks: tuple[str, ...]  # surprises in what is frozen
    executed: bool  # segments are those of an executed training forward, not what the module tree lets expect

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def line(self) -> str:
        """The one line that is logged at attach."""
        parts = [segment.summary() for segment in self.segments]
        if not any(segment.cached for segment in self.segments):
            parts.append('nothing is cached')
        parts.append(f'{len(self.frozen_modules)} frozen parts' if self.frozen_modules else 'nothing is frozen now: nothing to skip')
        return '; '.join([*parts, *self.sentences()])

    def sentences(self) -> list[str]:
        """Everything beside the table, for people."""
        lines = [f'{path} checkpoints its layers itself and is left alone' for path in self.left_alone]
        if self.kept:
            lines.append(f'frozen but kept in the graph, because gradients pass through: {shortened(self.kept)}')
        return [*lines, *self.remarks]


def shortened(names: Sequence[str], most: int = 8) -> str:
    return ', '.join(names[:most]) + (f', ... ({len(names)} in all)' if len(names) > most else '')


def render(plan: Plan, stats: Optional[Stats] = None, prediction: Optional[Prediction] = None, width: int = 120) -> str:
    """Plan as text, with the counters and the prediction if there are any."""
    console = Console(width=width, no_color=True, file=_Discard(), record=True)
    title = 'swift_speedup: segments' + ('' if plan.executed else ' (expected; no training step has been seen yet)')
    segments = Table(Column('segment', overflow='fold'), 'kind', Column('weights', justify='right'), 'frozen', 'graph', 'cached',
                     Column('why not', overflow='fold'), title=title)
    for segment in plan.segments:
        segments.add_row(segment.path or '(root)', segment.kind, f'{segment.parameters:,}', _yes(segment.frozen),
                         'skipped' if segment.graph_skipped else 'kept', _yes(segment.cached), segment.reason or '')
    console.print(segments)
    console.print(f'outermost frozen modules ({len(plan.frozen_modules)}): {shortened(plan.frozen_modules) or "none"}', markup=False)
    for sentence in plan.sentences():
        console.print(sentence, markup=False)
    if prediction is not None:
        console.print(_flops_table(prediction))
    if stats is not None:
        counters = Table('counter', 'value', title='swift_speedup: counters')
        for name, value in stats.to_dict().items():
            counters.add_row(name, f'{value:,.3f}' if isinstance(value, float) else f'{value:,}')
        console.print(counters)
    return console.export_text()


def _flops_table(prediction: Prediction) -> Table:
    table = Table(Column('part of a step', overflow='fold'),
                  *(Column(name, justify='right') for name in ('GFLOP', 'share f', 'stock / this')),
                  title=f'swift_speedup: predicted from FLOPs over {prediction.batches} batches')

    def add(name: str, flops: int, gain: Optional[float]) -> None:
        share = flops / prediction.stock if prediction.stock else 0.0
        table.add_row(name, f'{flops / prediction.batches / 1e9:,.3f}', f'{share:.3f}', f'{gain:.3f}x' if gain else '')
    add('stock: as the host runs it', prediction.stock, 1.0)
    add('graph of frozen parts skipped', prediction.skipped, prediction.gain_of_skipping)
    add('the same, every reusable output cached', prediction.warm, prediction.gain_when_warm)
    for name, flops in prediction.forward.items():
        ceiling = 1 / (1 - prediction.share(name)) if prediction.share(name) < 1 else None
        add(f'forward of {name}; ceiling 1/(1-f)', flops, ceiling)
    return table


def _yes(value: bool) -> str:
    return 'yes' if value else 'no'


class _Discard:
    """A file that keeps nothing: rich records what is printed, and export_text returns it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
