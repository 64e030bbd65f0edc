"""``swift-speedup precompute``: fills a cache folder without training.

The user's flags go through the real ms-swift up to the first step; then each sample of the training set passes once through what is
frozen, on all ranks. What the folder has already costs a lookup only.
"""
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import Progress
from torch import nn
from transformers.integrations.deepspeed import deepspeed_init, is_deepspeed_zero3_enabled

from ..api import Speedup, attach
from ..config import SpeedupConfig
from ..errors import HostError
from ..ranks import several
from . import ms_swift
from .replicating import keep_whole
from .trainer import take_back

_LOOK_SECONDS = 0.2


@dataclasses.dataclass
class _Filled(BaseException):
    """Ends the pipeline where training would begin; no error handler of the host may keep it."""

    handle: Speedup
    counts: dict[str, int]  # of all ranks
    main: bool  # whether this rank speaks for all


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
        if filled.main:
            print('{batches} batches: {computed} samples computed, {found} were there; {lost} lost, {troubles} troubles; {room}'.format(
                **filled.counts, room=filled.handle.room()), flush=True)
        take_back([filled.handle])
        return
    raise HostError('the pipeline ended before a trainer was ready: nothing can be computed for these flags')


def _fill(trainer: Any, config: SpeedupConfig) -> _Filled:
    model = trainer.accelerator.unwrap_model(trainer.model)
    handle = attach(model, config).speedup
    if config.replicate:
        keep_whole(trainer, handle)
    model = _brought_into_its_engine(trainer, model)
    loader = trainer.get_train_dataloader()
    forward = _FrozenForward(model, handle)
    model.train()  # entries are those of training
    batches, main = 0, trainer.accelerator.is_main_process
    with _progress(loader, main) as advance, torch.no_grad():
        for batch in loader:
            inputs = trainer._prepare_inputs(batch)
            with trainer.compute_loss_context_manager(), forward.until_enough(inputs):
                trainer.compute_loss(model, inputs)
            handle.wait_for_room()
            batches += 1
            advance()
    stats = handle.stats
    counts = gather_object([{
        'batches': batches, 'computed': stats.misses, 'found': stats.hits + stats.deduplicated, 'lost': stats.queue_drops,
        'troubles': stats.errors + stats.store_errors}])
    return _Filled(handle, {name: sum(each[name] for each in counts) for name in counts[0]}, main)


def _brought_into_its_engine(trainer: Any, model: nn.Module) -> nn.Module:
    """Engines that hold weights in parts bring them together for a forward; training would wrap the model later than this."""
    if is_deepspeed_zero3_enabled():
        deepspeed_init(trainer, num_training_steps=0, inference=True)
        return trainer.accelerator.prepare(trainer.model)
    return trainer.accelerator.prepare(trainer.model) if trainer.is_fsdp_enabled else model


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
        self._calls, self._end = [], None if self._handle.decides_with_others else self._ends.get(kind)
        try:
            yield
        except _Enough:
            return
        if kind not in self._ends:
            after = self._looked_up()
            self._ends[kind] = next((number for number, before in enumerate(self._calls) if before == after), None)


@contextmanager
def _progress(loader: Any, shown: bool) -> Iterator[Any]:
    """Of all ranks together. The function that is yielded is called after each batch."""
    add, ranks = _counter(), dist.get_world_size() if several() else 1
    try:
        total = len(loader) * ranks
    except TypeError:  # a stream
        total = None
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task('computing frozen parts', total=total)
        yield lambda: bar.update(task, completed=add('batches', 1))
        add('finished', 1)
        while shown and add('finished', 0) < ranks:
            bar.update(task, completed=add('batches', 0))
            time.sleep(_LOOK_SECONDS)
        bar.update(task, completed=add('batches', 0))


def _counter() -> Callable[[str, int], int]:
    """``add(name, n)`` answers with the sum over all ranks."""
    if not several():
        numbers: dict[str, int] = {}

        def add(name: str, number: int) -> int:
            numbers[name] = numbers.get(name, 0) + number
            return numbers[name]
        return add
    host = os.environ.get('MASTER_ADDR', 'localhost')
    server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    return (server or dist.TCPStore(host, port[0], is_master=False)).add
