"""What is skipped, what is reused and why not: data for programs, a table for people (Rule 11)."""
import dataclasses
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

from ..stats import Stats


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """One segment as it stands now."""

    path: str
    class_name: str
    parameters: int  # number of weights
    frozen: bool
    graph_skipped: bool  # in training forwards whose inputs need no grad
    cached: bool
    reason: Optional[str]  # why it is not skipped or not cached; None when it is both

    def summary(self) -> str:
        if self.cached:
            return f'{self.path or "the model"} ({self.class_name}): graph skipped, outputs reused'
        done = 'graph skipped, not cached' if self.graph_skipped else 'left as it is'
        return f'{self.path or "the model"} ({self.class_name}): {done}: {self.reason}'


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the plugin does to a model now."""

    segments: tuple[SegmentPlan, ...]
    frozen_modules: tuple[str, ...]  # outermost frozen modules: the graph rules apply wherever their inputs need no grad
    left_alone: tuple[str, ...]  # parents that checkpoint their layers by hand

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def line(self) -> str:
        """The one line that is logged at attach."""
        parts = [segment.summary() for segment in self.segments]
        if not self.segments:
            parts.append('no tower that takes packed patches: nothing is cached')
        parts.append(f'{len(self.frozen_modules)} frozen parts' if self.frozen_modules else 'nothing is frozen now: nothing to skip')
        return '; '.join([*parts, *self.remarks()])

    def remarks(self) -> list[str]:
        return [f'{path} checkpoints its layers itself and is left alone' for path in self.left_alone]


def render(plan: Plan, stats: Stats, width: int = 120) -> str:
    """Plan and counters as text."""
    console = Console(width=width, no_color=True, file=_Discard(), record=True)
    segments = Table('segment', 'class', 'weights', 'frozen', 'graph', 'cached', 'why not', title='swift_speedup: segments')
    for segment in plan.segments:
        segments.add_row(segment.path or '(root)', segment.class_name, f'{segment.parameters:,}', _yes(segment.frozen),
                         'skipped' if segment.graph_skipped else 'kept', _yes(segment.cached), segment.reason or '')
    console.print(segments)
    shown = ', '.join(plan.frozen_modules[:8]) + (', ...' if len(plan.frozen_modules) > 8 else '')
    console.print(f'outermost frozen modules ({len(plan.frozen_modules)}): {shown or "none"}', markup=False)
    for remark in plan.remarks():
        console.print(remark, markup=False)
    counters = Table('counter', 'value', title='swift_speedup: counters')
    for name, value in stats.to_dict().items():
        counters.add_row(name, f'{value:,.3f}' if isinstance(value, float) else f'{value:,}')
    console.print(counters)
    return console.export_text()


def _yes(value: bool) -> str:
    return 'yes' if value else 'no'


class _Discard:
    """A file that keeps nothing: rich records what is printed, and export_text returns it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
