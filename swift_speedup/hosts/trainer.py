"""For any Hugging Face ``Trainer``: what it knows about epochs, numbers in its log, a line of them when training ends (Rule 11)."""
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from torch import nn
from transformers import TrainerCallback

from ..api import Speedup, attach
from ..config import SpeedupConfig
from ..errors import AttachError
from ..graph.swap import root_handle
from ..log import logger
from ..stats import Stats


def size_text(nbytes: float) -> str:
    return f'{nbytes / 2 ** 30:.2f} GiB' if nbytes >= 2 ** 30 else f'{nbytes / 2 ** 20:.2f} MiB'


def follow(trainer: Any, *handles: Speedup) -> None:
    """Make ``trainer`` tell of epochs and log the numbers of ``handles``, which share them."""
    trainer.callback_handler.callbacks.insert(0, SummaryCallback(*handles))  # before those that report what is logged


class SummaryCallback(TrainerCallback):
    """Logs what was reused and what was computed, on the process that logs for the node. See :func:`follow`."""

    def __init__(self, *handles: Speedup):
        self._handles = handles
        self._epochs = 0  # that this process has seen: after a resume the cache may be empty
        self._unseen = True  # no step has ended yet
        self._samples = 0  # of the dataset, while nothing was said about the size of the cache

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        try:
            self._samples = len(train_dataloader.dataset) if state.is_local_process_zero else 0
        except (AttributeError, TypeError):  # a stream
            self._samples = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        handle = self._handles[0]
        if self._unseen and not handle.forwards:
            logger.warning('a step was trained, but no call of the model came through swift_speedup: nothing is skipped or cached. '
                           'Is the model compiled, or another one than the one that was attached?')
        self._unseen = False
        if self._samples and handle.stats.misses:
            each = handle.kept_bytes_per_sample()
            logger.info('%s per sample are kept: about %s for a dataset of %d rows with one such sample each; %s', size_text(each),
                        size_text(each * self._samples), self._samples, handle.room())
            self._samples = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for handle in self._handles:
            handle.epoch_ended(first=not self._epochs)
        self._epochs += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """TensorBoard and the like, which come after this one, log what they find here; the trainer's own history stays as it is."""
        if isinstance(logs, dict) and 'loss' in logs:
            logs.update(self._handles[0].stats.numbers())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_local_process_zero:
            return
        stats = self._handles[0].stats
        logger.info('reused %d of %d samples (%.1f %%), %d computed in %d calls, about %.1f s saved; %d samples, %.1f MB kept; '
                    '%d calls could not be looked up, %d cache troubles', stats.hits + stats.deduplicated,
                    stats.hits + stats.deduplicated + stats.misses, 100 * stats.hit_rate, stats.misses, stats.frozen_calls,
                    stats.saved_seconds, stats.stored_samples, stats.stored_bytes / 1e6, stats.bypassed, stats.errors)


class SpeedupCallback(SummaryCallback):
    """``Trainer(..., callbacks=[SpeedupCallback(cache_dir='...')])``, for the trainers of transformers and trl.

    The model is attached when training begins and is the plain model again when it has ended. Keywords are the fields of
    :class:`SpeedupConfig`. ``also``: other models that the trainer runs, such as the reference model of DPO; what they have in
    common with the trained one is computed once. A model that is attached already keeps its attachment and its options.
    """

    def __init__(self, also: Iterable[nn.Module] = (), **options: Any):
        super().__init__()
        self._config = SpeedupConfig.from_named(options)
        self._also = tuple(also)
        self._attached: list[Speedup] = []  # here, so taken back here
        self.stats: Optional[Stats] = None  # of the last training

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        before = root_handle(model)
        self._handles = attach_together(model, self._also, self._config)
        self.stats = self._handles[0].stats
        self._attached = [handle for handle in self._handles if handle is not before]
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        take_back(self._attached)


def take_back(handles: Sequence[Speedup]) -> None:
    """After a training, whose result must not be lost if classes cannot be given back."""
    for handle in reversed(handles):  # the first one closes the store
        try:
            handle.remove()
        except AttachError as left:  # FSDP has derived classes from ours
            handle.close()
            logger.info('left attached after the training: %s', left)


def attach_together(model: nn.Module, others: Iterable[nn.Module], config: SpeedupConfig) -> tuple[Speedup, ...]:
    """Attach ``model`` and, with its store and counters, other models: frozen parts that are equal are computed once for all.

    Others that lie inside ``model`` or are attached already stay as they are.
    """
    handle = root_handle(model)
    if handle is None:
        handle = attach(model, config).speedup
    inside = set(model.modules())
    others = [other for other in others if other not in inside and root_handle(other) is None]
    return (handle, *(attach(other, config, handle).speedup for other in others))
