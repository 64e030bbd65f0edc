"""A folder that the ranks of one training on one node share, and that is gone when the last of them ends.

Whoever uses it holds a lock on a file of its own inside, which the system lets go of however a process ends: what killed trainings left
behind is removed by the next one.
"""
import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Optional

_PREFIX = 'swift_speedup-'
_USERS = 'users'
_ENOUGH = 1 << 30  # bytes free in shared memory; with less, a folder on disk serves better
_held: dict[str, IO] = {}


def run_folder() -> Path:
    """The folder of this training on this node, made if need be and in use until this process ends. Raises ``OSError``."""
    base = _base()
    launch = '|'.join(os.environ.get(name, '') for name in ('TORCHELASTIC_RUN_ID', 'MASTER_ADDR', 'MASTER_PORT'))
    name = hashlib.sha256(f'{launch}|{os.getppid()}'.encode()).hexdigest()[:16]
    folder = base / f'{_PREFIX}{os.getuid()}-{name}'
    with _only_one(base):
        for other in base.glob(f'{_PREFIX}{os.getuid()}-*'):
            if other != folder and _owned(other) and not _in_use(other):
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _owned(folder):
            raise OSError(f'{folder} belongs to somebody else')
        if not _in_use(folder):
            shutil.rmtree(folder)  # of an earlier training with the same name
            folder.mkdir(mode=0o700)
        _hold(folder)
    return folder


def _base() -> Path:
    memory = Path('/dev/shm')
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= _ENOUGH:
        return memory
    return Path(tempfile.gettempdir())


def _only_one(base: Path) -> IO:
    file = open(base / f'{_PREFIX}{os.getuid()}.lock', 'a')
    fcntl.flock(file, fcntl.LOCK_EX)
    return file  # closing it lets go


def _owned(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _hold(folder: Path) -> None:
    if str(folder) in _held:
        return
    (folder / _USERS).mkdir(exist_ok=True)
    file = open(folder / _USERS / str(os.getpid()), 'w')
    fcntl.flock(file, fcntl.LOCK_EX)
    _held[str(folder)] = file
    atexit.register(_let_go, folder, os.getpid())


def _let_go(folder: Path, pid: int) -> None:
    file: Optional[IO] = _held.pop(str(folder), None)
    if file is None or pid != os.getpid():  # a forked child has the parent's lock
        return
    try:
        with _only_one(folder.parent):
            file.close()
            if not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # the next training removes it


def _in_use(folder: Path) -> bool:
    """Whether a living process holds a lock in it."""
    for path in (folder / _USERS).glob('*'):
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False
