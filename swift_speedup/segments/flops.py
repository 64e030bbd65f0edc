"""FLOPs of a training step without running it: weights and activations have shapes only, token ids and grids are real."""
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_META, _CPU = torch.device('meta'), torch.device('cpu')
_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class ShapesOnly(TorchDispatchMode):
    """Runs code whose weights are on the meta device while what it computes from token ids and grids stays real.

    Sequence lengths, masks and ``tolist()`` on a grid need values; hidden states do not. Whole numbers that are asked to be on the meta
    device and depend on no meta tensor are on the CPU instead; where the two meet, the real one gives up its values. Whole numbers
    that do depend on hidden states (the experts that a router chose) become zeros: right in number, not in value.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            if kwargs.get('device') is None or torch.device(kwargs['device']) != _META:
                return func(*args, **kwargs)
            made = func(*args, **{**kwargs, 'device': _CPU})
            return made.to(_META) if made.is_floating_point() else made
        if func in _INDEXED:
            args = (args[0], [place for index in args[1] for place in _as_positions(index)], *args[2:])
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(_META), (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, _with_numbers, func(*args, **kwargs))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _as_positions(index: Any) -> list:
    """A real mask as the positions it selects: of a mask without values nobody knows how many those are."""
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.is_meta:
        return list(index.nonzero(as_tuple=True))
    return [index]


def _with_numbers(tensor: torch.Tensor) -> torch.Tensor:
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU) if tensor.is_meta and whole else tensor


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs of one or more training steps: multiply and add are two; only matrix products and convolutions are counted."""

    total: int  # forward, backward and what checkpointing runs again
    forward: dict[str, int]  # by name: inside these modules, in the forward passes only


def count_steps(model: nn.Module, steps: Callable[[], Any], watched: Mapping[str, nn.Module]) -> StepFlops:
    """``steps()`` runs forward and backward of ``model``, whose parameters are on the meta device, under :class:`ShapesOnly`."""
    counter = FlopCounterMode(display=False, depth=0)
    forward = dict.fromkeys(watched, 0)
    with ShapesOnly(), counter, _experts_one_by_one(model), _autocast_of_another_device(), _watching(counter, watched, forward):
        steps()
    model.zero_grad(set_to_none=True)
    return StepFlops(counter.get_total_flops(), forward)


@contextmanager
def _experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """Grouped products of experts need real routing and are not counted by torch; one product per expert is the same work."""
    configs = {id(module.config): module.config for module in model.modules()
               if getattr(getattr(module, 'config', None), '_experts_implementation', None)}
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = 'eager'
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


@contextmanager
def _autocast_of_another_device() -> Iterator[None]:
    """The meta device has no autocast, and in transformers 4 rotary embeddings fail to switch it off; it changes no FLOPs."""
    original = torch.autocast.__init__

    def __init__(self, device_type, *args, **kwargs):
        original(self, 'cpu' if device_type == 'meta' else device_type, *args, **kwargs)
    torch.autocast.__init__ = __init__
    try:
        yield
    finally:
        torch.autocast.__init__ = original


@contextmanager
def _watching(counter: FlopCounterMode, watched: Mapping[str, nn.Module], forward: dict[str, int]) -> Iterator[None]:
    handles = []
    for name, module in watched.items():
        begun: list[int] = []

        def begin(module, args, begun=begun):
            begun.append(counter.get_total_flops())

        def end(module, args, output, name=name, begun=begun):
            spent = counter.get_total_flops() - begun.pop()
            if torch._C._current_graph_task_id() == -1:  # not a recomputation
                forward[name] += spent
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What FLOPs say about a step, before anyone trains. Real steps also spend time on memory traffic, kernels that start, data."""

    batches: int  # counts are sums over so many batches of the user's data
    stock: int  # FLOPs as the host runs them
    skipped: int  # with the graph of frozen parts skipped, every frozen output computed
    forward: dict[str, int]  # segment -> FLOPs of its forward passes
    reused: tuple[str, ...]  # segments whose outputs will be reused

    @property
    def warm(self) -> int:
        """FLOPs when every reusable output is served from the cache."""
        return self.skipped - sum(self.forward[name] for name in self.reused)

    @property
    def gain_of_skipping(self) -> float:
        return self.stock / self.skipped

    @property
    def gain_when_warm(self) -> float:
        return self.stock / self.warm if self.warm else float('inf')

    def share(self, segment: str) -> float:
        """The segment's forward passes as a part of a stock step, f; without them the step would be 1 / (1 - f) times as fast."""
        return self.forward[segment] / self.stock if self.stock else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), 'warm': self.warm, 'gain_of_skipping': self.gain_of_skipping,
                'gain_when_warm': self.gain_when_warm, 'shares': {name: self.share(name) for name in self.forward}}
