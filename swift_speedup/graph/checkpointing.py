"""What the frontier has to know about gradient checkpointing: is it on here, how to run past it, who does it by hand."""
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .swap import original_class

_HOST_WRAPPED = '__old_forward'  # ms-swift's own checkpointing of layers without native support leaves this on the instance
_CHECKPOINT_CALL = re.compile(r'(?<!\w)(?:checkpoint|_gradient_checkpointing_func)\(')
_LIBRARIES = ('torch.', 'peft.', 'accelerate.', 'transformers.modeling_', 'transformers.generation', 'transformers.utils',
              'transformers.integrations', 'builtins', 'typing')
_CACHE_NAMES = ('past_key_values', 'layer_past')


def is_active(module: nn.Module) -> bool:
    """Whether calling ``module`` now, with grad enabled, runs it under gradient checkpointing."""
    if isinstance(module, GradientCheckpointingLayer) or _HOST_WRAPPED in module.__dict__:
        return bool(getattr(module, 'gradient_checkpointing', False)) and module.training
    return type(module).__name__ == 'CheckpointWrapper'  # torch's own, used with FSDP


def call_plainly(module: nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
    """Call ``module`` outside its checkpoint; hooks run, and the layer sees the arguments checkpointing would have left it."""
    if not _checkpoints_itself(module, original):
        return original(module, *args, **kwargs)
    return nn.Module.__call__(module, *args, **plain_kwargs(module, original, kwargs))


def plain_kwargs(module: nn.Module, original: Callable, kwargs: dict) -> dict:
    """The keyword arguments as checkpointing would leave them: without caches of keys and values."""
    if not _checkpoints_itself(module, original):
        return kwargs
    kwargs = dict(kwargs)
    if kwargs.get('use_cache'):
        kwargs['use_cache'] = False
    if not getattr(module, '_can_checkpoint_with_cache', False):
        kwargs.update({name: None for name in _CACHE_NAMES if name in kwargs})
    return kwargs


def _checkpoints_itself(module: nn.Module, original: Callable) -> bool:
    return original is GradientCheckpointingLayer.__call__ and is_active(module) and _HOST_WRAPPED not in module.__dict__


def with_leaf(args: tuple) -> tuple[tuple, Any]:
    """``args`` with the first floating tensor replaced by a leaf that requires grad, and that leaf (``None``: there is no such tensor).

    Only positional tensors count: reentrant checkpointing sends no gradient through keywords.
    """
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            leaf = value.detach().requires_grad_()
            return (*args[:position], leaf, *args[position + 1:]), leaf
    return args, None


class ManualCheckpoints:
    """Models whose parent calls ``checkpoint`` around its layers itself.

    The parent's call decides from the layer's *inputs* whether anything is differentiated, before the layer's own ``__call__``
    is reached: a leaf made there would come too late. Everything inside such a parent is left as it was, and reported.
    """

    def __init__(self, root: nn.Module):
        self._inside: dict[str, tuple[nn.Module, frozenset[nn.Module]]] = {
            name: (module, frozenset(child for child in module.modules() if child is not module))
            for name, module in root.named_modules() if _checkpoints_by_hand(module)}

    def active(self) -> list[str]:
        """Paths of the parents that checkpoint by hand and have it switched on now."""
        return [name for name, (module, _) in self._inside.items() if _switched_on(module)]

    def untouchable(self) -> frozenset[nn.Module]:
        """The modules that must be left alone now."""
        active = [inside for module, inside in self._inside.values() if _switched_on(module)]
        return frozenset().union(*active) if active else frozenset()


def _switched_on(module: nn.Module) -> bool:
    return module.training and bool(getattr(module, 'gradient_checkpointing', True))


def _checkpoints_by_hand(module: nn.Module) -> bool:
    if isinstance(module, GradientCheckpointingLayer) or _HOST_WRAPPED in module.__dict__:
        return False
    return _calls_checkpoint(original_class(module))


@functools.cache  # reading sources takes long, and a model has few classes
def _calls_checkpoint(cls: type) -> bool:
    return any(_CHECKPOINT_CALL.search(source) for source in _own_sources(cls))


def _own_sources(cls: type) -> Iterator[str]:
    """Source of ``cls`` and of those bases that belong to a model, not to a library all models share."""
    for base in cls.__mro__:
        if base.__module__.startswith(_LIBRARIES) or base is object:
            continue
        try:
            yield inspect.getsource(base)
        except (OSError, TypeError):  # no source at hand: nothing says that it checkpoints by hand
            continue
