"""transformers' output capturing: ``output_hidden_states`` and the like are collected by hooks on layers while a model's forward runs.

A layer that is looked up does not run, so its own hooks are told here; what hooks inside it would collect cannot be had without
running it.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # before transformers 5 models collect in their own loops
    _collector = None

HOOK = 'output_capturing_hook'
_KEY = 'key'  # the hook's own name for what it collects


def needs_insides(module: nn.Module) -> bool:
    """Whether something is being collected that only running ``module`` yields: attention weights, states of layers inside it."""
    wanted = set(_collector.get() or ()) if _collector is not None else set()
    return bool(wanted) and any(
        getattr(hook, '__name__', '') == HOOK and _collects(hook, wanted) for part in module.modules() if part is not module
        for hook in part._forward_hooks.values())


def _collects(hook: Callable, wanted: set[str]) -> bool:
    own = dict(zip(hook.__code__.co_freevars, hook.__closure__ or ()))
    return _KEY not in own or own[_KEY].cell_contents in wanted


def tell(module: nn.Module, args: tuple, output: Any) -> None:
    """Hand an output that was not computed by running ``module`` to the hooks that collect outputs."""
    for hook in module._forward_hooks.values():
        if getattr(hook, '__name__', '') == HOOK:
            hook(module, args, output)


@contextmanager
def suspended() -> Iterator[None]:
    """Nothing is collected inside: what runs there was told before."""
    if _collector is None or not _collector.get():
        yield
        return
    token = _collector.set(None)
    try:
        yield
    finally:
        _collector.reset(token)
