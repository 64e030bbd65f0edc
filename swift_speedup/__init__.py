"""swift_speedup: faster fine-tuning of models with frozen parts, for ms-swift and Trainer-style loops, with the same results.

    from swift_speedup import MyModel
    model = MyModel(model)
"""
from typing import Any

from .api import MyModel, Speedup
from .config import SpeedupConfig
from .errors import (
    AttachError,
    AuditError,
    ConfigError,
    FrontierError,
    HostError,
    PatchError,
    RanksError,
    ShapeError,
    SpeedupError,
)
from .segments.plan import Plan, SegmentPlan
from .stats import Stats

__version__ = '0.1.0'
__all__ = [
    'AttachError', 'AuditError', 'ConfigError', 'FrontierError', 'HostError', 'MyModel', 'PatchError', 'Plan', 'RanksError',
    'SegmentPlan', 'ShapeError', 'Speedup', 'SpeedupCallback', 'SpeedupConfig', 'SpeedupError', 'Stats', '__version__',
]


def __getattr__(name: str) -> Any:
    if name == 'SpeedupCallback':  # transformers' Trainer is slow to import
        from .hosts.trainer import SpeedupCallback
        return SpeedupCallback
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
