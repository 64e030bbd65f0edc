"""One LMDB environment per folder and process: opened with care, again after a fork, its map made larger while others read.

LMDB itself is safe against processes that are killed and against writers and pruners in other processes. What it does not survive is
handled here: a data file that lost its end (reading beyond it would kill the process), a file that is none of ours, a fork, a lock
file on a full disk, a map that another process has outgrown.
"""
import contextlib
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional, TypeVar

import lmdb

from ..log import logger

DATA, LOCK = 'data.mdb', 'lock.mdb'
LAYOUT = b'swift_speedup 1'  # of the databases inside; another one is not read
DATABASES = (b'entries', b'order', b'places', b'notes', b'header')
_READERS = 1022
_LOCK_BYTES = 64 * (_READERS + 8)
_SMALLEST_MAP = 1 << 24
_ATTEMPTS = 5
_MAGIC = 0xBEEFC0DE
T = TypeVar('T')


class Unusable(Exception):
    """The folder cannot serve as a store; the text says why and what to do."""


class Environment:
    """``read`` and ``write`` run a function in a transaction. ``dbs`` are handles by name; ``None`` for one that does not exist."""

    def __init__(self, folder: Path, writable: bool, map_bytes: Optional[int] = None):
        self.folder = folder
        self.writable = writable
        self.users = 1
        self._map_bytes = map_bytes
        self._idle = threading.Condition()
        self._active = 0  # transactions in this process
        self._env: Optional[lmdb.Environment] = None
        self.dbs: dict[bytes, Any] = {}
        self._pid = 0
        self._open()

    def _open(self) -> None:
        if self._env is not None:  # after a fork: the parent's, whose place in the reader table is not this process's
            self._env.close()
            self._env = None
        if self.writable:
            _prepare(self.folder)
        size = self._map_bytes or _total_bytes(self.folder)
        while True:
            try:
                self._env = self._opened(size)
                break
            except lmdb.InvalidError as error:
                raise Unusable(f'{self.folder / DATA} is not a file of this cache ({error}); use another folder') from error
            except (MemoryError, lmdb.MemoryError, lmdb.Error, OSError) as error:
                if self.writable and size > _SMALLEST_MAP and _is_memory(error):
                    size //= 4
                    continue
                raise Unusable(f'{self.folder} cannot be opened ({error})') from error
        self._active, self._pid = 0, os.getpid()
        self._env.reader_check()  # slots of processes that were killed
        self._open_databases()

    def _opened(self, size: int) -> lmdb.Environment:
        common = dict(max_dbs=len(DATABASES), max_readers=_READERS, metasync=False, subdir=True)
        if self.writable:
            return lmdb.open(str(self.folder), map_size=max(size, _SMALLEST_MAP), **common)
        try:
            return lmdb.open(str(self.folder), readonly=True, create=False, **common)
        except lmdb.Error:  # no lock file and none can be made; checksums tell what a writer changes meanwhile
            return lmdb.open(str(self.folder), readonly=True, create=False, lock=False, **common)

    def _open_databases(self) -> None:
        """Handles must not be opened inside of a transaction that only reads: they would end with it."""
        env = self._env
        try:
            with env.begin() as txn:
                found = txn.stat()['entries']
            if not found and not self.writable:
                self.dbs = dict.fromkeys(DATABASES)
                return
            if not found:
                with env.begin(write=True) as txn:  # in one transaction: another process may be doing the same
                    if not txn.stat()['entries']:
                        txn.put(b'layout', LAYOUT, db=env.open_db(b'header', txn))
            header = env.open_db(b'header', create=False)
            with env.begin() as txn:
                layout = txn.get(b'layout', db=header)
            if layout != LAYOUT:
                found = (layout or b'something else').decode(errors='replace')
                raise Unusable(f'{self.folder} holds {found!r}, not {LAYOUT.decode()!r}; use another folder')
            self.dbs = {name: env.open_db(name, create=self.writable) for name in DATABASES}
        except (Unusable, lmdb.Error, AttributeError) as error:
            env.close()
            self._env = None
            if isinstance(error, Unusable):
                raise
            raise Unusable(f'{self.folder} holds something else than a cache ({error}); use another folder') from error

    def read(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """``work(transaction)``; buffers it gets are valid inside only. Raises ``lmdb.Error`` and ``Unusable``."""
        return self._run(work, write=False)

    def write(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """All of ``work`` or nothing. Waits for a writer in another process."""
        return self._run(work, write=True)

    def _run(self, work: Callable[[lmdb.Transaction], T], write: bool) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                with self._transaction(write) as txn:
                    return work(txn)
            except lmdb.MapResizedError:  # by another process
                self._resize(0)
            except lmdb.MapFullError:
                if attempt + 1 == _ATTEMPTS or not self._may_grow():
                    raise
                self._resize(2 * self._env.info()['map_size'])
            except lmdb.ReadersFullError:
                self._env.reader_check()
                time.sleep(0.01)
        with self._transaction(write) as txn:
            return work(txn)

    @contextlib.contextmanager
    def _transaction(self, write: bool) -> Iterator[lmdb.Transaction]:
        idle = self._idle
        with idle:
            if self._pid != os.getpid():
                self._open()
            if self._env is None:
                raise Unusable(f'{self.folder} is closed')
            self._active += 1
        try:
            with self._env.begin(write=write, buffers=not write) as txn:
                yield txn
        finally:
            with idle:
                self._active -= 1
                idle.notify_all()

    def _may_grow(self) -> bool:
        return self._env.info()['map_size'] < _total_bytes(self.folder)

    def _resize(self, size: int) -> None:
        """``0``: as large as another process made it."""
        with self._idle:
            while self._active:
                self._idle.wait()
            if self._env is not None:
                self._env.set_mapsize(size)

    def hold(self) -> None:
        """Wait until no transaction is under way and let none begin until :meth:`go_on`."""
        self._idle.acquire()
        while self._active:
            self._idle.wait()

    def go_on(self) -> None:
        self._idle.release()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._idle:
            while self._active:
                self._idle.wait()
            if self._env is not None:
                self._env.close()
                self._env = None


_opened: dict[str, Environment] = {}  # LMDB must not be opened twice in one process
_registry = threading.Lock()


def _before_fork() -> None:
    """No transaction is under way in any thread while the process forks: LMDB would wait for it in the child for ever."""
    _registry.acquire()
    for environment in _opened.values():
        environment.hold()


def _after_fork() -> None:
    for environment in _opened.values():
        environment.go_on()
    _registry.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def acquire(folder: Path, writable: bool, map_bytes: Optional[int] = None) -> Environment:
    """The environment of ``folder``, shared by all who use it in this process; give it back with :func:`release`.

    Raises ``Unusable``. ``writable`` is what is wanted; the environment says what it is.
    """
    name = os.path.realpath(folder)
    with _registry:
        known = _opened.get(name)
        if known is not None:
            known.users += 1
            return known
        try:
            _opened[name] = Environment(Path(name), writable, map_bytes)
        except OSError as error:
            raise Unusable(f'{folder} cannot be used ({error})') from error
        return _opened[name]


def release(environment: Environment) -> None:
    with _registry:
        environment.users -= 1
        if not environment.users:
            _opened.pop(str(environment.folder), None)
            environment.close()


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trouble = damage(folder / DATA)
    if trouble is not None:
        aside = folder / f'{DATA}.broken'
        logger.warning('%s: %s; it is moved to %s and the cache begins anew', folder / DATA, trouble, aside.name)
        os.replace(folder / DATA, aside)
    with open(folder / LOCK, 'ab') as file:  # it is mapped and written to: without its blocks, a full disk would kill the process
        os.posix_fallocate(file.fileno(), 0, _LOCK_BYTES) if hasattr(os, 'posix_fallocate') else file.truncate(_LOCK_BYTES)


def damage(path: Path) -> Optional[str]:
    """What is wrong with an LMDB data file that once was one; ``None``: nothing, or it never was one, or there is none."""
    try:
        size = path.stat().st_size
        with open(path, 'rb') as file:
            first = file.read(160)
            if len(first) < 160:
                return None if not first else f'it has {size} bytes only'
            page = struct.unpack_from('<I', first, 40)[0]
            if not any(first):
                return 'its beginning is empty'
            if struct.unpack_from('<I', first, 16)[0] != _MAGIC or page not in (4096, 8192, 16384, 32768, 65536):
                return None  # LMDB will say that it is invalid
            file.seek(page)
            second = file.read(160)
    except FileNotFoundError:
        return None
    pages = [(*struct.unpack_from('<QQ', meta, 136), meta) for meta in (first, second)
             if len(meta) == 160 and struct.unpack_from('<I', meta, 16)[0] == _MAGIC]
    last, transaction, _ = max(pages, key=lambda item: item[1])
    if transaction and size < (last + 1) * page:
        return f'it has {size} of {(last + 1) * page} bytes: its end is missing'
    return None


def _total_bytes(folder: Path) -> int:
    """Of the file system: no file of it can ever be larger."""
    return -(-shutil.disk_usage(folder).total // (1 << 20)) << 20


def _is_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, lmdb.MemoryError)) or 'Cannot allocate memory' in str(error)
