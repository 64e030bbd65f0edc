"""Every error this package raises on its own behalf. A message says what, where, got vs expected, and what to do."""


class SpeedupError(Exception):
    """Base class: catch it to catch everything that swift_speedup itself raises."""


class ConfigError(SpeedupError, ValueError):
    """An option has an unknown name or a value that is not allowed."""


class AttachError(SpeedupError, RuntimeError):
    """``MyModel`` cannot be attached to this object, or is already attached with other options."""


class FrontierError(SpeedupError, RuntimeError):
    """A module that must be trained would get no gradient; training on would be silently wrong."""


class AuditError(SpeedupError, RuntimeError):
    """A stored output is not what the module computes: training on would be silently wrong."""


class RanksError(SpeedupError, RuntimeError):
    """Ranks would not run the same sharded modules; going on would hang. Raised only when ranks are checked."""


class ShapeError(SpeedupError, RuntimeError):
    """An output does not have the shape that batches seen before let expect: the model may have acted on the wrong one."""


class HostError(SpeedupError, RuntimeError):
    """The installed ms-swift is missing, or is not one this version can hook into."""


class PatchError(SpeedupError, RuntimeError):
    """The installed ms-swift is not one that a patch of ours fits, or its files cannot be written."""
