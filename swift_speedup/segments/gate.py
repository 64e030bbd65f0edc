"""Rule 4: only pure segments are cached. What reading the module can say, and what watching it run shows."""
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..ranks import is_sharded
from ..trees import version
from . import state
from .adapters import idle_parts


class Gate:
    """Purity of one segment by train/eval mode; see ``memo.chain.Purity``.

    ``twin``: of the same segment of another model, built alike, such as the trained one beside a reference model. What was shown there
    need not be shown here.
    """

    def __init__(self, path: str, module: nn.Module, twin: Optional['Gate'] = None, sharded: bool = False):
        self._twin = twin
        self._sharded = sharded  # weights may be held in parts by several ranks
        self._path = path
        self._module = module
        self._verified: set[bytes] = set()
        self._forbidden: dict[bytes, str] = {}
        self._flags: dict[bytes, tuple[bool, ...]] = {}  # of the modes that were seen
        self._same: dict[bytes, bytes] = {}  # modes that were shown to give the values of another one

    def refusal(self, mode: bytes) -> Optional[str]:
        """Why the segment may not be reused in this mode now, ``None`` if it may."""
        if mode in self._forbidden:
            return self._forbidden[mode]
        if self.verified(mode) or mode != state.mode(self._module):  # the latter: asked later, when the module is in another mode
            return None
        return static_refusal(self._path, self._module, self._sharded)

    def verified(self, mode: bytes) -> bool:
        return mode in self._verified or (self._twin is not None and self._twin.verified(mode))

    def confirm(self, mode: bytes) -> None:
        self._verified.add(mode)

    def canonical(self, mode: bytes) -> bytes:
        """Called with the present mode: the one under which its values are kept."""
        if mode not in self._flags:
            self._flags[mode] = tuple(part.training for part in self._module.modules())
        return self._same.get(mode, mode)

    def share(self, mode: bytes, other: bytes) -> None:
        """``mode`` gives the values of ``other`` bit for bit."""
        self._same[mode] = other

    def modes(self) -> list[bytes]:
        own = [mode for mode in self._verified if mode not in self._same]
        return own if self._twin is None else [*own, *(mode for mode in self._twin.modes() if mode not in own)]

    @contextmanager
    def switched(self, mode: bytes) -> Iterator[None]:
        parts = list(self._module.modules())
        before = [part.training for part in parts]
        try:
            for part, flag in zip(parts, self._flags_of(mode)):
                part.training = flag
            yield
        finally:
            for part, flag in zip(parts, before):
                part.training = flag

    def _flags_of(self, mode: bytes) -> tuple[bool, ...]:
        return self._flags[mode] if mode in self._flags or self._twin is None else self._twin._flags_of(mode)

    def forbid(self, mode: bytes, reason: str) -> None:
        self._forbidden.setdefault(mode, reason)

    @contextmanager
    def observe(self, mode: bytes) -> Iterator[None]:
        """Forbid reuse if what runs inside draws random numbers or writes a buffer."""
        with watching(self._module) as seen:
            yield
        for reason in seen:
            self.forbid(mode, reason)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put random number generators back to where they were: an extra run must not change training."""
        states = _generator_states(self._module)
        try:
            yield
        finally:
            torch.set_rng_state(states['torch'])
            random.setstate(states['random'])
            numpy.random.set_state(states['numpy'])
            for name, state in states.items():
                if name.startswith('cuda'):
                    torch.cuda.set_rng_state(state, name)


@contextmanager
def watching(module: nn.Module) -> Iterator[list[str]]:
    """The list tells afterwards what makes ``module`` impure: random numbers that were drawn inside, buffers that were written."""
    seen: list[str] = []
    generators, buffers = _generator_states(module), _buffer_versions(module)
    yield seen
    drawn = [name for name, state in _generator_states(module).items() if not _same(state, generators[name])]
    if drawn:
        seen.append(f'it draws random numbers ({", ".join(drawn)})')
    written = [name for name, version in _buffer_versions(module).items() if buffers.get(name) != version]
    if written:
        seen.append(f'it writes its buffers ({", ".join(written[:3])})')


def static_refusal(path: str, module: nn.Module, sharded: bool = False) -> Optional[str]:
    """What reading ``module`` says against reuse in its current mode. ``sharded``: weights may be held in parts by several ranks."""
    return _weights_elsewhere(path, module, sharded) or active_randomness(path, module)


def _weights_elsewhere(path: str, module: nn.Module, sharded: bool) -> Optional[str]:
    for name, tensor in state.tensors(module):
        place = f'{path}.{name}'
        if sharded and is_sharded(tensor):
            continue
        if tensor.is_meta:
            return f'{place} is on the meta device, so weights cannot be fingerprinted'
        if hasattr(tensor, 'ds_id'):
            return f'{place} is partitioned by DeepSpeed ZeRO-3'
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f'{place} is a {type(tensor).__name__}, so this rank may not hold all of it'
    return None


_REMEDY = '(eval=true runs it in eval mode, which changes training)'


def active_randomness(path: str, module: nn.Module) -> Optional[str]:
    """Dropout, drop path and batch statistics that are switched on inside ``module``."""
    idle = idle_parts(module)
    for name, part in module.named_modules():
        if not part.training or part in idle:
            continue
        place = f'{path}.{name}'.strip('.')
        if isinstance(part, _DropoutNd) and part.p > 0:
            return f'dropout p={part.p} is active at {place} {_REMEDY}'
        rate = getattr(part, 'drop_prob', None) if 'drop' in type(part).__name__.lower() else None
        if isinstance(rate, float) and rate > 0:
            return f'drop path p={rate} is active at {place} {_REMEDY}'
        if isinstance(part, _NormBase) and part.track_running_stats:
            return f'batch statistics are updated at {place} {_REMEDY}'
        if isinstance(part, nn.RReLU):
            return f'random slopes are drawn at {place} {_REMEDY}'
    return None


def _generator_states(module: nn.Module) -> dict[str, Any]:
    states: dict[str, Any] = {
        'torch': torch.get_rng_state(), 'random': random.getstate(), 'numpy': numpy.random.get_state()}
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == 'cuda'}
    states.update({str(device): torch.cuda.get_rng_state(device) for device in devices})
    return states


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return all(_same(one, other) for one, other in zip(left, right))
    if isinstance(left, numpy.ndarray):
        return numpy.array_equal(left, right)
    return left == right


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), version(buffer)) for name, buffer in module.named_buffers()}
