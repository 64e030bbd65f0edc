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
        self._waiting: dict[str, tuple[nn.Module, torch.Tensor]] = {}
        self._got_gradient: set[str] = set()
        self._queued = False
        self._done = False

    def watch(self, name: str, module: nn.Module, leaf: torch.Tensor, output: Any) -> None:
        """``module`` (at path ``name``) was called with ``leaf`` and answered ``output``; raises ``FrontierError`` if that cannot train."""
        differentiable = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not differentiable:
            raise FrontierError(f'{name or "the model"}: it has trainable parameters and got an input that requires grad, '
                                f'but no output does; {_REMEDY}')
        if self._done:
            return
        self._waiting[name] = (module, leaf)
        leaf.register_hook(lambda gradient: self._got_gradient.add(name))
        for tensor in differentiable:
            tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._conclude)

    def _conclude(self) -> None:
        missing = [name for name, (module, _) in self._waiting.items()
                   if name not in self._got_gradient and not _has_gradient(module)]
        self._waiting.clear()
        self._got_gradient.clear()
        self._done = True
        if missing:
            raise FrontierError(f'{", ".join(missing)}: no gradient arrived in the first backward pass; {_REMEDY}')


def _has_gradient(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad)
