"""The code of modules that no library version stands for: another forward in the same file must not find old entries."""
import functools
import sys
from types import CodeType, FunctionType
from typing import Any

from ..memo.key import Digest

_VERSIONED = ('torch', 'transformers')  # their versions are part of every fingerprint


@functools.cache
def code_digest(cls: type) -> str:
    """Of the files that define ``cls`` and its bases; of the functions themselves where there is no file. Empty for libraries whose
    version is known anyway."""
    digest, found = Digest(), False
    for base in cls.__mro__:
        if base is object or base.__module__.partition('.')[0] in _VERSIONED:
            continue
        digest.add(base.__qualname__, _file_digest(base.__module__) or _functions(base))
        found = True
    return digest.value().hex() if found else ''


def function_digest(function: Any) -> str:
    """Of a function's own code, because a wrapper has the name of what it wraps; empty for what is not written in Python."""
    code = getattr(getattr(function, '__func__', function), '__code__', None)
    return _code(code).hex() if isinstance(code, CodeType) else ''


@functools.cache
def _file_digest(module: str) -> bytes:
    path = getattr(sys.modules.get(module), '__file__', None)
    try:
        with open(path or '', 'rb') as file:
            return Digest().add('file', file.read()).value()
    except OSError:
        return b''


def _functions(cls: type) -> bytes:
    digest = Digest()
    for name, value in sorted(vars(cls).items()):
        function = getattr(value, '__func__', value)
        if isinstance(function, FunctionType):
            digest.add(name, _code(function.__code__))
    return digest.value()


@functools.cache
def _code(code: CodeType) -> bytes:
    digest = Digest().add('code', code.co_code).add('names', repr((code.co_names, code.co_varnames)))
    for constant in code.co_consts:
        digest.add('constant', _code(constant) if isinstance(constant, CodeType) else _text(constant))
    return digest.value()


def _text(constant: Any) -> str:
    """The same in every process: the order of a set of strings is not."""
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
