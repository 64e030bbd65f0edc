"""Counters of one attachment. Skips are proved by these counts, not by clocks."""
import dataclasses
from typing import Any


@dataclasses.dataclass
class Stats:
    """What was reused and what was computed since ``MyModel`` was attached. A *sample* is one image or video."""

    hits: int = 0  # samples served from the store
    misses: int = 0  # samples that had to be computed
    deduplicated: int = 0  # samples that repeat another sample of the same call
    frozen_calls: int = 0  # times a cached segment was really run
    checks: int = 0  # extra runs that proved a segment pure; not in frozen_calls
    audited: int = 0  # hits that were computed as well and compared
    bypassed: int = 0  # calls of a frozen segment that could not be looked up (see the report for why)
    stored_samples: int = 0  # samples in the store now
    stored_bytes: int = 0  # bytes in the store now
    evicted: int = 0  # samples dropped to stay inside the budget
    queue_drops: int = 0  # samples not kept because writing could not keep pace, or there was no room
    store_errors: int = 0  # troubles of the store (damaged entries, a full disk), each a miss
    errors: int = 0  # cache troubles that became misses (Rule 7)
    frozen_seconds: float = 0.0  # host time inside cached segments that were run
    lookup_seconds: float = 0.0  # host time spent on keys, fingerprints and assembling hits
    saved_seconds: float = 0.0  # estimate: hits at the measured seconds per row; host clock

    @property
    def hit_rate(self) -> float:
        """Share of looked-up samples that were not computed; 0.0 before the first lookup."""
        seen = self.hits + self.deduplicated + self.misses
        return (self.hits + self.deduplicated) / seen if seen else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), 'hit_rate': self.hit_rate}

    def numbers(self) -> dict[str, float]:
        """What belongs into a trainer's log, by the names it has there."""
        return {'speedup_hit_rate': round(self.hit_rate, 4), 'speedup_stored_gib': round(self.stored_bytes / (1 << 30), 4),
                'speedup_saved_seconds': round(self.saved_seconds, 1), 'speedup_queue_drops': float(self.queue_drops)}
