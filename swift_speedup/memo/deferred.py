"""A tensor whose value is looked up, or computed, when something first needs it.

A frozen call answers with these. What only moves rows and columns is noted down; another frozen call takes them as they are and answers
with such tensors itself; everything else makes them real. So an output is looked up exactly where it is used, which is where it is
smallest, and outputs that nobody reads are neither kept nor computed.
"""
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..trees import map_tensors


class Value(Protocol):
    """What stands behind a deferred tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    known: 'torch.Tensor | None'  # what ``real`` answered

    def real(self) -> torch.Tensor: ...  # always the same tensor
    def moved(self, func: Callable, args: tuple, kwargs: dict) -> 'Value | None': ...  # None: needs the real tensor


class Deferred(torch.Tensor):
    """Plain operations on it run on, and answer with, ordinary tensors."""

    value: Value

    @staticmethod
    def __new__(cls, value: Value) -> 'Deferred':
        self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        self.value = value
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ABOUT and not (func in _ABOUT_GRAD and args[0].value.known is not None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _MOVING and isinstance(args[0], Deferred):
            value = args[0].value.moved(func, args[1:], kwargs)
            if value is not None:
                return Deferred(value)
        return func(*settled(args), **settled(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # reached from C++ only
        return func(*settled(args), **settled(kwargs or {}))


def settled(value: Any) -> Any:
    """``value`` with real tensors in place of deferred ones, in nested tuples, lists and mappings."""
    if isinstance(value, Deferred):
        return value.value.real()
    if type(value) in (tuple, list):
        return type(value)(settled(item) for item in value)
    if type(value) is dict:
        return {name: settled(item) for name, item in value.items()}
    return map_tensors(settled, value) if hasattr(value, '__dataclass_fields__') or isinstance(value, tuple) else value


# Answered from the shape alone.
_ABOUT = {
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.layout.__get__,
    torch.Tensor.ndim.__get__, torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__, torch.Tensor.grad_fn.__get__,
    torch.Tensor.grad.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__, torch.Tensor.is_sparse.__get__,
    torch.Tensor.is_quantized.__get__, torch.Tensor.is_nested.__get__, torch.Tensor.is_cpu.__get__, torch.Tensor.nbytes.__get__,
    torch.Tensor.itemsize.__get__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel,
    torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point,
    torch.is_complex, torch.Tensor.get_device, torch.Tensor.__len__, torch.Tensor.__hash__, torch.numel,
}
_ABOUT_GRAD = {torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__, torch.Tensor.grad_fn.__get__,
               torch.Tensor.grad.__get__}
# They move or copy values; ``Value.moved`` decides by their arguments.
_MOVING = {
    torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.to, torch.Tensor.type, torch.Tensor.float,
    torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.flatten, torch.Tensor.permute,
    torch.Tensor.transpose, torch.Tensor.squeeze, torch.Tensor.unsqueeze, torch.Tensor.__getitem__, torch.reshape, torch.flatten,
    torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze,
}
