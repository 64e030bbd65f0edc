"""transformers' output capturing: ``output_hidden_states`` and the like are collected by hooks on layers while a model's forward runs.

A layer that is looked up does not run, so its own hooks are told here; what hooks inside it would collect cannot be had without
running it. Before transformers 5 the layers' forwards are replaced instead, for the time of the model's; such layers are run.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # before transformers 5
    _collector = None

HOOK = 'output_capturing_hook'
_KEY = 'key'  # the hook's own name for what it collects
_REPLACED = 'collected_outputs'  # the same in a replaced forward, whose own name is that of the plain one


def needs_insides(module: nn.Module) -> bool:
    """Whether something is being collected that only running ``module`` yields: attention weights, states of layers inside it."""
    if _collector is None:
        return any(_REPLACED in _captured(part.__dict__.get('forward')) for part in module.modules())
    wanted = set(_collector.get() or ())
    return bool(wanted) and any(
        getattr(hook, '__name__', '') == HOOK and _collects(hook, wanted) for part in module.modules() if part is not module
        for hook in part._forward_hooks.values())


def _captured(function: Any) -> tuple[str, ...]:
    """Names of the variables around a function that it uses."""
    return getattr(getattr(function, '__code__', None), 'co_freevars', ())


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
