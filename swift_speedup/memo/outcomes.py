"""What became of the samples of a call: hit, miss or repetition, each sample counted once however many outputs it has."""
from collections.abc import Mapping

from ..stats import Stats
from .chain import Call
from .value import Value


class Outcomes:
    def __init__(self, stats: Stats):
        self._stats = stats

    def count(self, value: Value, source: Mapping[int, int], seconds: float) -> None:
        """``source`` has the samples that were not found, with the one computed in their place; ``seconds``: what one unit takes."""
        root, sizes = value.call.root, value.layout.sizes
        spared = [index for index in range(len(sizes)) if source.get(index) != index]
        self.mark(root, {index: 'hits' if index not in source else 'deduplicated' for index in spared})
        self._stats.saved_seconds += seconds * sum(sizes[index] for index in spared)

    def mark(self, root: Call, outcomes: Mapping[int, str]) -> None:
        """A sample computed for one output and found for another is a miss."""
        for index, outcome in outcomes.items():
            before = root.outcome[index]
            if before is None or (outcome == 'misses' and before != 'misses'):
                root.outcome[index] = outcome
                setattr(self._stats, outcome, getattr(self._stats, outcome) + 1)
                if before is not None:
                    setattr(self._stats, before, getattr(self._stats, before) - 1)
