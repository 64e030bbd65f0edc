"""``replicate=true``: frozen segments stay whole on every rank where an engine would hold their weights in parts.

Then running them is no collective, and each rank decides alone what it computes (Rule 8).
"""
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from ..api import Speedup
from ..errors import HostError
from ..log import logger
from ..ranks import full_shape, is_sharded, several, whole
from .trainer import size_text


def keep_whole(trainer: Any, handle: Speedup) -> None:
    """Before the engine gets the model. A collective under ZeRO-3, which has cut the weights up while they were loaded."""
    modules = handle.reusable_modules()
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    if not parameters or not several():
        return
    fsdp = getattr(trainer.accelerator.state, 'fsdp_plugin', None)
    partitioned = any(map(is_sharded, parameters))
    if not partitioned and (fsdp is None or fsdp.fsdp_version != 2):
        return  # they are whole anyhow
    if getattr(trainer.args, 'lisa_activated_layers', 0):
        raise HostError('replicate=true (--frozen_replicate true) needs parts that stay frozen; LISA trains others after each step')
    nbytes = sum(full_shape(parameter).numel() * parameter.element_size() for parameter in parameters)
    ranks = dist.get_world_size()
    if partitioned:
        handle.at_removal(_as_buffers(handle.root, modules))
    else:
        fsdp.ignored_modules = [*_modules_of(fsdp.ignored_modules, handle.root), *modules]
        trainer.add_callback(_StayFrozen(parameters))
    logger.info('replicate: %s of frozen weights stay whole on each of %d ranks, %s more per rank than in parts',
                size_text(nbytes), ranks, size_text(nbytes * (1 - 1 / ranks)))


def _modules_of(ignored: Any, root: nn.Module) -> Sequence[nn.Module]:
    if isinstance(ignored, str):
        raise HostError(f'replicate=true cannot be put beside fsdp_config ignored_modules={ignored!r}: leave one of them out')
    return ignored or ()


def _as_buffers(root: nn.Module, modules: Sequence[nn.Module]) -> Callable[[], None]:
    """DeepSpeed cuts up every parameter there is, but leaves buffers alone. The function that is returned takes it back, with whole
    weights. Checkpoints hold both alike."""
    # Sets would give each rank an order of its own.
    full = {parameter: whole(parameter).detach() for module in modules for parameter in module.parameters()}
    owners = [(module, dict(module._parameters)) for module in root.modules()
              if not full.keys().isdisjoint(module._parameters.values())]
    unseen = [_Unseen(part) for module in modules for part in module.modules()]
    for module, before in owners:
        for name, parameter in before.items():
            if parameter in full:
                del module._parameters[name]
                module.register_buffer(name, full[parameter])

    def restore() -> None:
        for part in unseen:
            part.restore()
        made: dict[torch.Tensor, nn.Parameter] = {}
        for module, before in owners:
            for name, parameter in before.items():
                if parameter in full:
                    buffer = module._buffers.pop(name)
                    made.setdefault(buffer, nn.Parameter(buffer, requires_grad=False))
                    before[name] = made[buffer]
                else:
                    before[name] = module._parameters[name]
            module._parameters.clear()
            module._parameters.update(before)
    return restore


class _Unseen:
    """A module that DeepSpeed need not know. What it would do around its calls, for parameters that are not there, it would do on some
    ranks only, and these would then fetch other weights ahead than the others."""

    _NAMES = 'register_forward_hook', 'register_forward_pre_hook'

    def __init__(self, module: nn.Module):
        self._module = module
        for name in self._NAMES:
            setattr(module, name, partial(self._register, getattr(module, name)))
        # Models ask their towers for their dtype, which is that of a parameter.
        module.parameters = module.buffers

    @staticmethod
    def _register(own: Callable, hook: Callable, **options: Any) -> RemovableHandle:
        return RemovableHandle(OrderedDict()) if hook.__module__.startswith('deepspeed.') else own(hook, **options)

    def restore(self) -> None:
        for name in (*self._NAMES, 'parameters'):
            delattr(self._module, name)


class _StayFrozen(TrainerCallback):
    """Gradients of weights that the engine does not know would not be averaged over the ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(parameter.requires_grad for parameter in self._parameters):
            raise HostError('weights that replicate=true keeps whole were unfrozen; train without --frozen_replicate')
