"""``swift-speedup precompute``: fills a cache folder without training.

The user's flags go through the real ms-swift up to the first step; then each sample of the training set passes once through what is
frozen, on all ranks. What the folder has already costs a lookup only.
"""
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from ..api import Speedup, attach
from ..config import SpeedupConfig
from ..errors import HostError
from . import ms_swift


@dataclasses.dataclass
class _Filled(BaseException):
    """Ends the pipeline where training would begin; no error handler of the host may keep it."""

    batches: int
    handle: Speedup


class _Enough(BaseException):
    """Ends a forward: everything frozen has been used."""


def run_precompute(command: str, argv: list[str]) -> None:
    """Fill the cache folder for ``swift <command> <argv>`` and print what was done."""
    pipeline = ms_swift.pipeline_of(command)
    configs: list[SpeedupConfig] = []
    pipeline.args_class = ms_swift.with_flags(pipeline.args_class, configs.append)

    def fill(trainer: Any, model: Any) -> None:
        raise _fill(trainer, configs[-1])
    ms_swift.hook(fill)
    try:
        pipeline(argv).main()
    except _Filled as filled:
        stats = filled.handle.stats
        print(f'{filled.batches} batches: {stats.misses} samples computed, {stats.hits + stats.deduplicated} were there; '
              f'{stats.queue_drops} lost, {stats.errors + stats.store_errors} troubles; {filled.handle.room()}', flush=True)
        filled.handle.remove()
        return
    raise HostError('the pipeline ended before a trainer was ready: nothing can be computed for these flags')


def _fill(trainer: Any, config: SpeedupConfig) -> _Filled:
    model = trainer.accelerator.unwrap_model(trainer.model)
    handle = attach(model, config).speedup
    loader = trainer.get_train_dataloader()
    forward = _FrozenForward(model, handle)
    model.train()  # entries are those of training
    batches = 0
    with _progress(loader, trainer.accelerator.is_local_main_process) as advance, torch.no_grad():
        for batch in loader:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager(), forward.until_enough(inputs):
                trainer.compute_loss(model, inputs)
            handle.wait_for_room()
            batches += 1
            advance()
    trainer.accelerator.wait_for_everyone()
    return _Filled(batches, handle)


class _FrozenForward:
    """Forwards that end when nothing frozen is left to do. Where that is, the first forward of each kind of batch shows: after it, the
    module that is trained and is called next does not change the counters any more."""

    def __init__(self, model: nn.Module, handle: Speedup):
        self._handle = handle
        self._ends: dict[frozenset, Optional[int]] = {}  # kind of batch -> number of the call of a trained module that need not be made
        self._calls: list[int] = []  # the counters at each call of a trained module in this forward
        self._end: Optional[int] = None
        for module in model.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, args: tuple) -> None:
        if self._end is not None and len(self._calls) == self._end:
            raise _Enough
        self._calls.append(self._looked_up())

    def _looked_up(self) -> int:
        stats = self._handle.stats
        return stats.hits + stats.misses + stats.deduplicated + stats.frozen_calls + stats.checks + stats.bypassed

    @contextmanager
    def until_enough(self, inputs: Mapping) -> Iterator[None]:
        kind = frozenset(name for name, value in inputs.items() if value is not None)
        self._calls, self._end = [], self._ends.get(kind)
        try:
            yield
        except _Enough:
            return
        if kind not in self._ends:
            after = self._looked_up()
            self._ends[kind] = next((number for number, before in enumerate(self._calls) if before == after), None)


@contextmanager
def _progress(loader: Any, shown: bool) -> Iterator[Any]:
    try:
        total = len(loader)
    except TypeError:  # a stream
        total = None
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task('computing frozen parts', total=total)
        yield lambda: bar.advance(task)
