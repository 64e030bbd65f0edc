"""The two graph rules (Rule 3), evaluated at every call from ``requires_grad`` alone.

*Freeze rule*: a frozen module none of whose inputs needs grad runs under ``no_grad``, outside gradient checkpointing, and what it
returns is detached. That also neutralises hooks which make embeddings require grad, wherever they sit.
*Leaf rule*: a checkpointed module that must get gradients and has no input that needs grad is handed a leaf, made outside its
checkpoint: reentrant checkpointing drops a module whose inputs need none.
"""
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, Protocol

import torch
from torch import nn

from ..trees import carries_grad, map_tensors, tensors_in
from . import checkpointing
from .leaf_check import LeafCheck
from .swap import CALL

Evaluate = Callable[[nn.Module, str, Callable, tuple, dict], Any]


class Observer(Protocol):
    """Someone who watches what the rules do in a training forward. Its methods must not change anything."""

    def wanted(self, frozen: Mapping[nn.Module, bool]) -> bool: ...  # asked after each forward of the root, for the next one
    def forward(self, root: bool, args: tuple, kwargs: dict) -> AbstractContextManager[None]: ...
    def entered(self, module: nn.Module) -> None: ...
    def skipping(self, module: nn.Module) -> AbstractContextManager[None]: ...  # around the run of an outermost frozen module
    def skipped(self, module: nn.Module, entry: str, args: tuple, kwargs: dict, output: Any) -> None: ...
    def passed(self, module: nn.Module) -> None: ...  # frozen, but its inputs need grad
    def trained(self, args: tuple, kwargs: dict, output: Any) -> None: ...


class _Pass(threading.local):
    """What one thread is doing: backward recomputes layers on threads of its own."""

    depth = 0  # nesting of swapped calls
    inside_frozen = False  # the freeze rule is running a module
    severed = False  # a frozen output that a hook had made require grad was detached
    observer: Optional[Observer] = None  # watches the present outermost call
    frozen: Optional[dict] = None  # module -> bool, valid until the outermost call ends
    untouchable: frozenset = frozenset()


class Frontier:
    """Call handler for swapped modules.

    ``names`` maps modules to their paths. ``evaluate(module, entry, run, args, kwargs)`` answers for outermost frozen modules, and
    for those inside them that it runs; ``run(args, kwargs)`` is the real call, now or later. ``settle`` makes real what ``evaluate``
    may have answered with. ``entering`` is told of calls of modules that are trained. ``observer`` watches the first training forward
    and those that follow a change of what is frozen.
    """

    def __init__(self, root: nn.Module, names: Mapping[nn.Module, str], observer: Optional[Observer] = None):
        self._root = root
        self.evaluate: Optional[Evaluate] = None
        self.settle: Callable[[Any], Any] = lambda value: value
        self.entering: Callable[[nn.Module, tuple, dict], None] = lambda module, args, kwargs: None
        self.manual = checkpointing.ManualCheckpoints(root)
        self._names = names
        self._leaf_check = LeafCheck()
        self._pass = _Pass()
        self._observer = observer
        self._observing = observer is not None
        self.forwards = 0  # outermost calls that were seen

    def call(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if state.observer is not None:
            state.observer.entered(module)
        if state.inside_frozen and not torch.is_grad_enabled():
            return self._run_inside_frozen(module, entry, original, args, kwargs)
        if state.depth:
            state.depth += 1
            try:
                return self._apply_rules(module, entry, original, args, kwargs)
            finally:
                state.depth -= 1
        return self._outermost(module, entry, original, args, kwargs)

    def _outermost(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        state.frozen, state.severed, state.untouchable = {}, False, self.manual.untouchable()
        is_root = module is self._root and entry == CALL
        training = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1  # the second: not a recomputation
        observer = state.observer = self._observer if self._observing and training else None
        state.depth = 1
        self.forwards += 1
        try:
            with nullcontext() if observer is None else observer.forward(is_root, args, kwargs):
                if observer is not None:
                    observer.entered(module)
                output = self._apply_rules(module, entry, original, args, kwargs)
        finally:
            state.depth, state.observer = 0, None
        if is_root:
            output = self.settle(output)
        if training and is_root:
            if self._observer is not None:
                self._observing = self._observer.wanted(state.frozen)
            if state.severed and not is_frozen(module, state.frozen):
                output = self._keep_backward_possible(output)
        return output

    def _apply_rules(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        if module in state.untouchable:
            return original(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            if self.evaluate is not None and is_frozen(module, state.frozen):
                return self._evaluate(module, entry, original, args, kwargs)
            return original(module, *args, **kwargs)
        if is_frozen(module, state.frozen):
            if not carries_grad(args) and not carries_grad(kwargs):
                return self._run_frozen(module, entry, original, args, kwargs)
            if state.observer is not None:
                state.observer.passed(module)
            return original(module, *args, **kwargs)
        self.entering(module, args, kwargs)
        if entry == CALL and checkpointing.is_active(module):
            args, kwargs = self.settle(args), self.settle(kwargs)  # outside the checkpoint
            plain = carries_grad(args) or carries_grad(kwargs)
            output = (original(module, *args, **kwargs) if plain else
                      self._run_with_leaf(module, original, args, kwargs))
        else:
            output = original(module, *args, **kwargs)
        if state.observer is not None:
            state.observer.trained(args, kwargs, output)
        return output

    def _run_frozen(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        state = self._pass
        observer = state.observer
        state.inside_frozen = True
        try:
            with torch.no_grad(), nullcontext() if observer is None else observer.skipping(module):
                output = self._run_inside_frozen(module, entry, original, args, kwargs)
        finally:
            state.inside_frozen = False
        if any(tensor.requires_grad for tensor in tensors_in(output)):
            state.severed = True
            output = map_tensors(torch.Tensor.detach, output)
        if observer is not None:
            observer.skipped(module, entry, args, kwargs, output)
        return output

    def _run_inside_frozen(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        """``module`` is frozen, or lies inside a module that is; grad is off."""
        if self.evaluate is not None:
            return self._evaluate(module, entry, original, args, kwargs)
        return checkpointing.call_plainly(module, original, args, kwargs)

    def _run_with_leaf(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
        args, leaf = checkpointing.with_leaf(args)
        output = original(module, *args, **kwargs)
        if leaf is not None:
            self._leaf_check.watch(self._names.get(module, type(module).__name__), module, leaf, output)
        return output

    def _evaluate(self, module: nn.Module, entry: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        kwargs = checkpointing.plain_kwargs(module, original, kwargs)

        def run(run_args: tuple, run_kwargs: dict) -> Any:
            state, outer = self._pass, self._pass.inside_frozen
            state.inside_frozen = True
            try:
                with torch.no_grad():
                    return checkpointing.call_plainly(module, original, run_args, run_kwargs)
            finally:
                state.inside_frozen = outer
        return self.evaluate(module, entry, run, args, kwargs)

    def _keep_backward_possible(self, output: Any) -> Any:
        """A step in which no trainable module took part still has a loss to call ``backward`` on, as it had with the hooks."""
        if any(tensor.requires_grad for tensor in tensors_in(output)):
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
