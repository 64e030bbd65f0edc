"""``SpeedupConfig``: the one source of option names, help texts and defaults.

Keyword arguments of ``MyModel``, command-line flags (``--frozen_<field>``) and environment variables
(``SWIFT_SPEEDUP_<FIELD>``) are all generated from its fields.
"""
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Optional

from .errors import ConfigError

FLAG_PREFIX = 'frozen_'
ENV_PREFIX = 'SWIFT_SPEEDUP_'
_OF_OTHERS = ('SWIFT_SPEEDUP_CHECK_RANKS',)  # for finding faults: no option
_TRUE, _FALSE = ('true', '1', 'yes', 'on'), ('false', '0', 'no', 'off')
_UNSET = ('', 'none', 'null')


def _option(default: Any, help: str, allowed: str, parse: Callable[[Any], Any]) -> Any:
    return dataclasses.field(default=default, metadata={'help': help, 'allowed': allowed, 'parse': parse})


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        name = value.strip().lower() if isinstance(value, str) else value
        if name not in names:
            raise ValueError(value)
        return name
    return parse


def _gib(value: Any) -> Optional[float]:
    if value is None or (isinstance(value, str) and value.strip().lower() in _UNSET):
        return None
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(value)
    return number


def _folder(value: Any) -> Optional[str]:
    if value is None or (isinstance(value, str) and value.strip().lower() in _UNSET):
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(value)
    return os.path.abspath(os.path.expanduser(value))


def _share(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise ValueError(value)
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedupConfig:
    """Options of the plugin. Values are checked and normalised on construction; a bad one raises ``ConfigError``."""

    cache: str = _option(
        'auto', 'Where outputs of frozen segments are kept: "ram" = memory of this process; "disk" = the folder cache_dir; "auto" = '
        'that folder if it is given, else memory, shared by the ranks of a node; "off" = nowhere: only the gradient graph is skipped.',
        'auto, off, ram or disk', _choice('auto', 'off', 'ram', 'disk'))
    cache_dir: Optional[str] = _option(
        None, 'Folder of a cache that stays: other runs, ranks and machines that are given the same folder find what one has computed.',
        'a path', _folder)
    ram_gib: Optional[float] = _option(
        None, 'Memory budget of the cache in GiB for this process; with cache_dir, of copies in front of the folder. Default without a '
        'folder: a quarter of the memory that is free at attach, divided by the number of local ranks.',
        'a positive number of GiB, such as 8 or 0.5', _gib)
    disk_gib: Optional[float] = _option(
        None, 'Budget of cache_dir in GiB; what was not used for longest goes first. Default: until no more than 5 % of the disk, or '
        '10 GiB, are free.', 'a positive number of GiB, such as 100', _gib)
    prefix: str = _option(
        'auto', 'Whether the frozen lower layers of a text model are cached per token sequence: "auto" = where looking up is cheaper '
        'than computing, "on" = always, "off" = never: only their graph is skipped.', 'auto, on or off', _choice('auto', 'on', 'off'))
    audit: float = _option(
        0.0, 'Share of the hits that are computed as well and compared; a difference ends the training with an error.',
        'a number from 0 to 1', _share)
    dedup: bool = _option(
        True, 'Evaluate a sample that occurs several times in one batch only once.', 'true or false', _flag)
    replicate: bool = _option(
        False, 'Under ZeRO-3 or FSDP2, keep frozen segments that can be cached whole on every rank, so that each rank decides alone '
        'what it computes. Costs the memory of their weights on each rank; the price is logged.', 'true or false', _flag)
    eval: bool = _option(
        False, 'Run frozen segments in eval mode, so that those with dropout, drop path or batch statistics can be cached. '
        'This changes training.', 'true or false', _flag)

    def __post_init__(self):
        for option in dataclasses.fields(self):
            object.__setattr__(self, option.name, _parse(option, getattr(self, option.name), option.name))
        if self.cache == 'disk' and self.cache_dir is None:
            raise ConfigError('cache=disk needs a folder: set cache_dir')
        if self.cache in ('ram', 'off') and self.cache_dir is not None:
            raise ConfigError(f'cache={self.cache} keeps nothing in a folder: leave cache_dir={self.cache_dir} out, or set cache=auto')
        if self.disk_gib is not None and self.cache_dir is None:
            raise ConfigError(f'disk_gib={self.disk_gib:g} is the budget of a folder: set cache_dir')

    @classmethod
    def from_named(cls, values: Mapping[str, Any], spell: Callable[[str], str] = str) -> 'SpeedupConfig':
        """Build a config from ``{field: value}``. ``spell(field)`` is how the user wrote that name; it is quoted in errors."""
        options = {option.name: option for option in dataclasses.fields(cls)}
        parsed = {}
        for name, value in values.items():
            if name not in options:
                known = ', '.join(spell(option) for option in options)
                raise ConfigError(f'unknown option {spell(name)}={value!r}; the options are: {known}')
            parsed[name] = _parse(options[name], value, spell(name))
        return cls(**parsed)

    @classmethod
    def from_env(cls, environ: Optional[Mapping[str, str]] = None) -> 'SpeedupConfig':
        """Read ``SWIFT_SPEEDUP_<FIELD>`` variables; an unknown name with that prefix is an error, not a silent no-op."""
        environ = os.environ if environ is None else environ
        named = {name[len(ENV_PREFIX):].lower(): value for name, value in environ.items()
                 if name.startswith(ENV_PREFIX) and name not in _OF_OTHERS}
        return cls.from_named(named, env_name)


def _parse(option: dataclasses.Field, value: Any, spelled: str) -> Any:
    try:
        return option.metadata['parse'](value)
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f'{spelled}={value!r} is not allowed; expected {option.metadata["allowed"]}') from None


def option_fields() -> tuple[dataclasses.Field, ...]:
    """The options in order; each field's ``metadata`` has ``help`` and ``allowed``."""
    return dataclasses.fields(SpeedupConfig)


def flag_name(field: str) -> str:
    return f'--{FLAG_PREFIX}{field}'


def env_name(field: str) -> str:
    return f'{ENV_PREFIX}{field.upper()}'
