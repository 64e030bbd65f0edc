"""For any Hugging Face ``Trainer``: what it knows about epochs, numbers in its log, a line of them when training ends (Rule 11)."""
from typing import Any

from transformers import TrainerCallback

from ..api import Speedup
from ..log import logger


def _size(nbytes: float) -> str:
    return f'{nbytes / 2 ** 30:.2f} GiB' if nbytes >= 2 ** 30 else f'{nbytes / 2 ** 20:.2f} MiB'


def follow(trainer: Any, handle: Speedup) -> None:
    """Make ``trainer`` tell of epochs and log the numbers of ``handle``."""
    trainer.callback_handler.callbacks.insert(0, SummaryCallback(handle))  # before those that report what is logged


class SummaryCallback(TrainerCallback):
    """Logs what was reused and what was computed, on the process that logs for the node. See :func:`follow`."""

    def __init__(self, handle: Speedup):
        self._handle = handle
        self._epochs = 0  # that this process has seen: after a resume the cache may be empty
        self._samples = 0  # of the dataset, while nothing was said about the size of the cache

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        try:
            self._samples = len(train_dataloader.dataset) if state.is_local_process_zero else 0
        except (AttributeError, TypeError):  # a stream
            self._samples = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stats = self._handle.stats
        if self._samples and stats.misses:
            each = self._handle.kept_bytes_per_sample()
            logger.info('%s per sample are kept: about %s for a dataset of %d rows with one such sample each; %s', _size(each),
                        _size(each * self._samples), self._samples, self._handle.room())
            self._samples = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._handle.epoch_ended(first=not self._epochs)
        self._epochs += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """TensorBoard and the like, which come after this one, log what they find here; the trainer's own history stays as it is."""
        if isinstance(logs, dict) and 'loss' in logs:
            logs.update(self._handle.stats.numbers())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_local_process_zero:
            return
        stats = self._handle.stats
        logger.info('reused %d of %d samples (%.1f %%), %d computed in %d calls, about %.1f s saved; %d samples, %.1f MB kept; '
                    '%d calls could not be looked up, %d cache troubles', stats.hits + stats.deduplicated,
                    stats.hits + stats.deduplicated + stats.misses, 100 * stats.hit_rate, stats.misses, stats.frozen_calls,
                    stats.saved_seconds, stats.stored_samples, stats.stored_bytes / 1e6, stats.bypassed, stats.errors)
