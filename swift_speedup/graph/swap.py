"""Class swap: route every call of a module through a function of ours without touching the module's own contents.

One dynamic subclass per original class serves all its instances, because hosts look modules up by class (FSDP wraps the
class of the first match only). The subclass keeps name, qualname and module: ``save_pretrained``, output capturing and
remote-code saving read them. ``__call__`` is overridden, not ``forward``: the host may shadow that on the instance. Modules that
are entered by another method have that method overridden as well.
"""
import copyreg
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import nn

from ..errors import AttachError

CallHandler = Callable[[nn.Module, str, Callable, tuple, dict], Any]
CALL = '__call__'
_MARK, _ORIGINAL = '_speedup_swap', '_speedup_original'


class ClassSwap:
    """All swapped classes of one attachment.

    ``handler(module, entry, original, args, kwargs)`` receives every call; ``entry`` is ``CALL`` or one of ``entries``, names of
    other methods that enter a module, and ``original`` is that method of the original class, unbound. ``handle`` is what
    ``root.speedup`` answers.
    """

    def __init__(self, handler: CallHandler, root: nn.Module, handle: Any, entries: Iterable[str] = ()):
        self.root = root
        self.handle = handle
        self._handler = handler
        self._entries = tuple(entries)
        self._classes: dict[type, type] = {}

    def apply(self, modules: Iterable[nn.Module]) -> None:
        """Swap ``modules``; their classes must be :func:`swappable`."""
        for module in modules:
            original = type(module)
            if original not in self._classes:
                self._classes[original] = self._subclass(original)
            module.__class__ = self._classes[original]

    def undo(self) -> None:
        """Give every swapped module below the root its own class back, modules that moved there since included."""
        swapped = [module for module in self.root.modules() if _swap_of(module) is self]
        for module in swapped:
            if _MARK not in type(module).__dict__:
                raise AttachError(f'{type(module).__qualname__} was derived from the attached class by another tool, such as '
                                  'fully_shard; remove() must come before that')
        for module in swapped:
            module.__class__ = original_class(module)

    def _subclass(self, original: type) -> type:
        swap, handler, original_call = self, self._handler, original.__call__

        def __call__(self, *args, **kwargs):
            return handler(self, CALL, original_call, args, kwargs)

        def __reduce_ex__(self, protocol):
            # Pickles and deep copies are those of the plain module: nothing of ours may outlive this object (Rule 2).
            function, arguments, *rest = original.__reduce_ex__(self, protocol)
            if function is copyreg.__newobj__:  # pickle insists on the object's present class there
                function = object.__new__
            return (function, tuple(original if argument is swapped else argument for argument in arguments), *rest)

        def speedup(self):
            if self is not swap.root:
                raise AttributeError('speedup')
            return swap.handle

        namespace = {
            '__module__': original.__module__,
            '__qualname__': original.__qualname__,
            '__doc__': original.__doc__,
            '__call__': __call__,
            '__reduce_ex__': __reduce_ex__,
            'speedup': property(speedup),
            _MARK: swap,
            _ORIGINAL: original,
            **{name: self._entry(name, getattr(original, name)) for name in self._entries if has_method(original, name)},
        }
        base = _with_safe_getattr(original) if _asks_super_of_its_class(original) else original
        swapped = type(original)(original.__name__, (base,), namespace)
        return swapped

    def _entry(self, name: str, original: Callable) -> Callable:
        handler = self._handler

        @functools.wraps(original)
        def entry(self, *args, **kwargs):
            return handler(self, name, original, args, kwargs)
        return entry


def _asks_super_of_its_class(original: type) -> bool:
    code = getattr(vars(original).get('__getattr__'), '__code__', None)
    return code is not None and '__class__' in code.co_names


def _with_safe_getattr(original: type) -> type:
    """To derive from in place of a class whose ``__getattr__`` asks ``super(self.__class__, self)``, as ms-swift's do: that would come
    back to itself for ever."""
    asking = threading.local()

    def __getattr__(self, name):
        asked = asking.__dict__.setdefault('names', set())
        if (id(self), name) in asked:
            return super(original, self).__getattr__(name)
        asked.add((id(self), name))
        try:
            return original.__getattr__(self, name)
        finally:
            asked.discard((id(self), name))
    return type(original)(original.__name__, (original,), {'__module__': original.__module__, '__getattr__': __getattr__})


def has_method(cls: type, name: str) -> bool:
    """Whether ``name`` is a plain method of ``cls``: no property, class or static method."""
    return inspect.isfunction(inspect.getattr_static(cls, name, None))


def _swap_of(module: Any) -> Optional[ClassSwap]:
    return getattr(type(module), _MARK, None)  # inherited too: ``fully_shard`` derives a class of its own from ours


def original_class(module: nn.Module) -> type:
    """The module's own class, swapped or not."""
    swapped = next((cls for cls in type(module).__mro__ if _MARK in cls.__dict__), None)
    return type(module) if swapped is None else swapped.__dict__[_ORIGINAL]


def root_handle(module: Any) -> Any:
    """The handle of the attachment whose root is ``module``; ``None`` when there is none."""
    swap = _swap_of(module)
    return swap.handle if swap is not None and swap.root is module else None


def is_swapped(module: Any) -> bool:
    return _swap_of(module) is not None


def swappable(module: nn.Module) -> bool:
    """Whether the class of ``module`` can be swapped: traced modules have classes of their own making."""
    return not is_traced(module) and not is_swapped(module)


def is_traced(module: nn.Module) -> bool:
    return isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule))
