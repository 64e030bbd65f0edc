"""Rule 9: a segment whose lookups cost more than they save turns itself off, looks again from time to time, and says so."""
from typing import Optional

_WINDOW = 16  # lookups between two judgements
_STRIKES = 2  # judgements against it before a segment is turned off: one may be noise
_PAUSE, _LONGEST_PAUSE = 256, 4096  # calls that are run without a lookup, doubled each time it is turned off again
_SELDOM = 0.02  # a share of hits below this, in an epoch over samples that were seen before, means that samples do not come back
_FEW = 64  # samples on which that is not judged


class Cost:
    """What looking up costs one segment and what it saves, in seconds of the host per unit of work."""

    def __init__(self):
        self.reason: Optional[str] = None  # why it is off now
        self._seconds: Optional[float] = None  # to compute one unit
        self._strikes = 0
        self._left = 0  # calls until it is tried again
        self._pause = _PAUSE
        self._epoch = [0, 0]  # samples looked up and hit in this epoch
        self._start()

    def _start(self) -> None:
        self._calls = self._units = self._computed = 0
        self._compute_seconds = self._lookup_seconds = 0.0

    def worth_it(self) -> bool:
        """Asked once for each call."""
        if self.reason is None:
            return True
        self._left -= 1
        if self._left > 0:
            return False
        self.reason = None
        self._strikes = _STRIKES - 1  # one more judgement against it is enough now
        self._start()
        return True

    def record(self, units: int, computed: int, compute_seconds: float, lookup_seconds: float) -> None:
        """One lookup of ``units`` of work, of which ``computed`` had to be computed; ``units`` 0: more about the last one."""
        self._calls += units > 0
        self._units += units
        self._computed += computed
        self._compute_seconds += compute_seconds
        self._lookup_seconds += lookup_seconds
        if self._calls >= _WINDOW:
            self._judge()
            self._start()

    def expect(self, seconds: float) -> None:
        """What computing one unit took another process; of no weight once something was computed here."""
        self._seconds = seconds if self._seconds is None else self._seconds

    def count(self, samples: int, hits: int) -> None:
        self._epoch[0] += samples
        self._epoch[1] += hits

    def epoch_ended(self, first: bool) -> None:
        """Samples that do not come back in a later epoch, such as randomly augmented images, are not worth keeping."""
        samples, hits = self._epoch
        self._epoch = [0, 0]
        if not first and samples >= _FEW and hits < _SELDOM * samples:
            self._turn_off(f'samples do not come back: {hits} of {samples} were found in the last epoch')

    def _judge(self) -> None:
        if self._computed:
            now = self._compute_seconds / self._computed
            self._seconds = now if self._seconds is None else (self._seconds + now) / 2
        if self._seconds is None or not self._units:
            return
        lookup = self._lookup_seconds / self._units
        share = 1 - self._computed / self._units
        saves = (share if share > _SELDOM else 1.0) * self._seconds  # without hits: what a hit would save
        self._strikes = self._strikes + 1 if saves < lookup else 0
        if self._strikes >= _STRIKES:
            self._turn_off(f'looking up takes {lookup * 1e6:,.1f} us per unit of work and saves {saves * 1e6:,.1f} us')
        elif self._strikes == 0:
            self._pause = _PAUSE

    def _turn_off(self, reason: str) -> None:
        self.reason = reason
        self._strikes = 0
        self._left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
