"""Self-check of the frontier: a module that was handed a leaf must receive a gradient, or training must stop with a clear error."""
from typing import Any

import torch
from torch import nn

from ..errors import FrontierError
from ..trees import tensors_in

_REMEDY = ('its parameters would silently stay untrained. Run without gradient checkpointing or with '
           'gradient_checkpointing_kwargs {"use_reentrant": false}, or call model.speedup.remove()')


class LeafCheck:
    """Watches the leaves of the first backward pass; later passes only check that outputs are differentiable."""

    def __init__(self):
        self._watched: dict[str, nn.Module] = {}
        self._reached: set[str] = set()  # an output got a gradient in this backward pass
        self._trained: set[str] = set()  # the leaf got one
        self._queued = False
        self._done = False

    def watch(self, name: str, module: nn.Module, leaf: torch.Tensor, output: Any) -> None:
        """``module`` (at path ``name``) was called with ``leaf`` and answered ``output``.

        Raises ``FrontierError`` when that cannot train the module, now or at the end of the first backward pass.
        """
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not differentiable:
            raise FrontierError(f'{name}: it has trainable parameters and got an input that requires grad, '
                                f'but no output does; {_REMEDY}')
        if self._done:
            return
        self._watched[name] = module
        leaf.register_hook(lambda gradient: self._trained.add(name))
        for tensor in differentiable:
            tensor.register_hook(lambda gradient: self._on_backward(name))

    def _on_backward(self, name: str) -> None:
        self._reached.add(name)
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._conclude)

    def _conclude(self) -> None:
        untrained = [name for name in self._reached - self._trained if not _has_gradient(self._watched[name])]
        self._done = True
        self._watched.clear()
        if untrained:
            raise FrontierError(f'{", ".join(sorted(untrained))}: no gradient arrived in the first backward pass; {_REMEDY}')


def _has_gradient(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad)
