"""The two graph rules (Rule 3), evaluated at every call from ``requires_grad`` alone.

*Freeze rule*: a frozen module none of whose inputs needs grad runs under ``no_grad``, outside gradient checkpointing, and what it
returns is detached. That also neutralises hooks which make embeddings require grad, wherever they sit.
*Leaf rule*: a checkpointed module that must get gradients and has no input that needs grad is handed a leaf, made outside its
checkpoint: reentrant checkpointing drops a module whose inputs need none.
"""
import threading
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import nn

from ..trees import carries_grad, map_tensors, tensors_in
from . import checkpointing
from .leaf_check import LeafCheck

Evaluate = Callable[[nn.Module, Callable, tuple, dict], Any]


class _Pass(threading.local):
    """What one thread is doing: backward recomputes layers on threads of its own."""

    depth = 0  # nesting of swapped calls
    inside_frozen = False  # the freeze rule is running a module
    severed = False  # a frozen output that a hook had made require grad was detached
    frozen: Optional[dict] = None  # module -> bool, valid until the outermost call ends
    untouchable: frozenset = frozenset()


class Frontier:
    """Call handler for swapped modules.

    ``names`` maps modules to their paths. ``reused`` holds the modules whose evaluation may be replaced;
    ``evaluate(module, run, args, kwargs)`` does so, ``run(args, kwargs)`` being the real call.
    """

    def __init__(self, root: nn.Module, names: Mapping[nn.Module, str]):
        self._root = root
        self.reused: frozenset[nn.Module] = frozenset()
        self.evaluate: Optional[Evaluate] = None
        self.manual = checkpointing.ManualCheckpoints(root)
        self._names = names
        self._leaf_check = LeafCheck()
        self._pass = _Pass()

    def call(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        if torch.compiler.is_compiling():
            return original_call(module, *args, **kwargs)
        if state.inside_frozen and not torch.is_grad_enabled():
            return self._run_inside_frozen(module, original_call, args, kwargs)
        outermost = state.depth == 0
        if outermost:
            state.frozen, state.severed, state.untouchable = {}, False, self.manual.untouchable()
        state.depth += 1
        try:
            output = self._apply_rules(module, original_call, args, kwargs)
        finally:
            state.depth -= 1
        if outermost and state.severed and module is self._root and not is_frozen(module, state.frozen):
            output = self._keep_backward_possible(output)
        return output

    def _apply_rules(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        if module in state.untouchable:
            return original_call(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            if module in self.reused and is_frozen(module, state.frozen):
                return self._evaluate(module, original_call, args, kwargs)
            return original_call(module, *args, **kwargs)
        if is_frozen(module, state.frozen):
            if carries_grad(args) or carries_grad(kwargs):
                return original_call(module, *args, **kwargs)
            return self._run_frozen(module, original_call, args, kwargs)
        if checkpointing.is_active(module) and not carries_grad(args) and not carries_grad(kwargs):
            return self._run_with_leaf(module, original_call, args, kwargs)
        return original_call(module, *args, **kwargs)

    def _run_frozen(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        state.inside_frozen = True
        try:
            with torch.no_grad():
                output = self._run_inside_frozen(module, original_call, args, kwargs)
        finally:
            state.inside_frozen = False
        if any(tensor.requires_grad for tensor in tensors_in(output)):
            state.severed = True
            output = map_tensors(torch.Tensor.detach, output)
        return output

    def _run_inside_frozen(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        """``module`` is frozen, or lies inside a module that is; grad is off."""
        run = self._evaluate if module in self.reused else checkpointing.call_plainly
        return run(module, original_call, args, kwargs)

    def _run_with_leaf(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        args, leaf = checkpointing.with_leaf(args)
        output = original_call(module, *args, **kwargs)
        if leaf is not None:
            self._leaf_check.watch(self._names.get(module, type(module).__name__), module, leaf, output)
        return output

    def _evaluate(self, module: nn.Module, original_call: Callable, args: tuple, kwargs: dict) -> Any:
        def run(run_args: tuple, run_kwargs: dict) -> Any:
            return checkpointing.call_plainly(module, original_call, run_args, run_kwargs)
        return self.evaluate(module, run, args, kwargs)

    def _keep_backward_possible(self, output: Any) -> Any:
        """A step in which no trainable module took part still has a loss to call ``backward`` on, as it had with the hooks."""
        if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors_in(output)):
            return output
        return map_tensors(lambda tensor: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor, output)


def is_frozen(module: nn.Module, known: dict) -> bool:
    """Whether no tensor that belongs to ``module`` or to a module inside it requires grad now.

    ``known`` keeps the answers for all of them; share it between calls only as long as nothing can have changed.
    """
    frozen = known.get(module)
    if frozen is None:
        frozen = not _owns_grad(module) and all(is_frozen(child, known) for child in module.children())
        known[module] = frozen
    return frozen


def _owns_grad(module: nn.Module) -> bool:
    """Parameters, buffers and plain tensor attributes (replicas and hyper-networks keep weights there)."""
    contents = module.__dict__
    return any(isinstance(value, torch.Tensor) and value.requires_grad
               for place in (contents['_parameters'], contents['_buffers'], contents) for value in place.values())
