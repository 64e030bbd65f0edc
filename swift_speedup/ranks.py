"""Rule 8: parameters that several ranks hold in parts, and decisions that these ranks make together.

Where parameters are sharded, running a module is a collective: all ranks run it, the same number of times, or none does.
"""
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn

from .errors import RanksError

CHECK = 'SWIFT_SPEEDUP_CHECK_RANKS'  # a variable: before each decision, see that all ranks make the same one
_CHECK_SECONDS = 60


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it only: by ZeRO-3 or by FSDP2 (and other users of ``DTensor``)."""
    return hasattr(tensor, 'ds_id') or _is_dtensor(tensor)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, 'full_tensor') and hasattr(tensor, 'to_local')


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Its shape when no rank holds a part of it only; ZeRO-3 leaves empty tensors behind."""
    return getattr(parameter, 'ds_shape', parameter.shape)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    if _is_dtensor(tensor):
        return tensor.to_local()
    part = getattr(tensor, 'ds_tensor', None)
    return tensor if part is None else part


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, on every rank. A collective."""
    if _is_dtensor(tensor):
        return tensor.full_tensor()
    import deepspeed  # there, or there would be no such tensor
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.data.clone()


def units_around(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module inside one that FSDP2 brings weights together for: the innermost such module around it."""
    found: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, unit: Optional[nn.Module]) -> None:
        if unit is not None:
            found[module] = unit
        for child in module.children():
            walk(child, module if _is_unit(module) else unit)
    walk(root, None)
    return found


@contextmanager
def brought_together(unit: Optional[nn.Module]) -> Iterator[None]:
    """The weights of ``unit`` as in its forward: for a module inside it that is run at another time. A collective."""
    if unit is None or not any(map(is_sharded, _parameters_of(unit))):
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def is_fsdp1(root: nn.Module) -> bool:
    """Whether the first version of FSDP manages ``root`` or parts of it: whose weights are whole it does not tell."""
    return any(getattr(module, '_is_fsdp_managed_module', False) for module in root.modules()) and not any(
        map(_is_unit, root.modules()))


def _is_unit(module: nn.Module) -> bool:
    return any(cls.__name__ == 'FSDPModule' for cls in type(module).__mro__)  # by name: importing it takes a while


def _parameters_of(unit: nn.Module) -> Iterator[nn.Parameter]:
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not _is_unit(child):
            yield from _parameters_of(child)


class Together:
    """The ranks of a training, for decisions of all of them. Made by all at the same place."""

    def __init__(self):
        # On the host: nothing waits for a device, and nothing is put between the training's own collectives.
        self._group = dist.new_group(backend='gloo')
        self.size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.decisions = 0
        self._checking = os.environ.get(CHECK, '').lower() in ('1', 'true', 'yes', 'on')

    def smallest(self, level: int, what: str) -> int:
        """The smallest ``level`` of any rank. ``what`` names the decision; it is compared when ranks are checked."""
        self.decisions += 1
        if self._checking:
            self._check(what)
        told = torch.tensor([level], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return int(told)

    def all_of(self, own: Sequence[Any]) -> list[Any]:
        """The lists of all ranks, one after another."""
        lists: list[Any] = [None] * self.size
        dist.all_gather_object(lists, list(own), group=self._group)
        return [item for items in lists for item in items]

    def _check(self, what: str) -> None:
        """Raises ``RanksError`` where ranks would wait for each other for ever."""
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=_CHECK_SECONDS), wait_all_ranks=True)
        except RuntimeError as late:
            raise RanksError(f'rank {self.rank} is at decision {self.decisions}, {what}, and other ranks are not: {late}') from late
        found = self.all_of([(self.decisions, what)])
        if len(set(found)) > 1:
            places = '; '.join(f'rank {rank}: decision {number}, {text}' for rank, (number, text) in enumerate(found))
            raise RanksError(f'ranks do not do the same, and would wait for each other: {places}. Please report it; '
                             'cache=off (--frozen_cache off) trains without')


def several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

