"""peft's adapters inside a module: which tensors are theirs, and which of them have no part in the value now."""
from collections.abc import Iterator

from torch import nn

_OWNER = 'BaseTunerLayer'  # by name: peft is slow to import, and ms-swift has tuners of its own


def adapter_tensors(module: nn.Module) -> set[int]:
    """``id`` of every tensor that belongs to an adapter (peft keeps them beside a ``base_layer``)."""
    return {id(tensor) for layer in _adapted(module) for part in _beside_base(layer) for tensor in part.parameters()}


def idle_parts(module: nn.Module) -> set[nn.Module]:
    """Modules of adapters that are switched off, as in the reference pass of DPO: the layer answers as its base layer does."""
    return {part for layer in _adapted(module) if layer.__dict__.get('_disable_adapters') and not layer.merged
            for child in _beside_base(layer) for part in child.modules()}


def _adapted(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.modules():
        if isinstance(getattr(layer, 'base_layer', None), nn.Module) and any(cls.__name__ == _OWNER for cls in type(layer).__mro__):
            yield layer


def _beside_base(layer: nn.Module) -> Iterator[nn.Module]:
    for name, child in layer.named_children():
        if name != 'base_layer':
            yield child
