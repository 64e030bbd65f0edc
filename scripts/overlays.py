"""Older ms-swift releases beside the installed one, without an environment each: ``python scripts/overlays.py [RELEASE ...]``.

An overlay is a folder with only the packages in which a release differs from this environment; all else, torch above all, is shared.
First on the path it wins: ``PYTHONPATH="$(python scripts/overlays.py 4.3.0)" swift sft ...``. Prints the folders of all releases, or
of those that are named. They are kept, in ``$XDG_CACHE_HOME/swift_speedup/overlays``; pip installs what is missing.
"""
import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

# The newest of each package that its release of ms-swift allows, where that is not the one that is installed.
_TRANSFORMERS_4 = ('transformers==4.57.6', 'huggingface_hub==0.36.2', 'tokenizers==0.22.2', 'peft==0.18.1')
_DATASETS_3 = ('datasets==3.6.0', 'dill==0.3.8', 'multiprocess==0.70.16', 'fsspec==2025.3.0')
PINS = {
    '3.12.6': ('ms-swift==3.12.6', *_TRANSFORMERS_4, *_DATASETS_3, 'trl==0.24.0'),
    '4.0.2': ('ms-swift==4.0.2', *_TRANSFORMERS_4, *_DATASETS_3, 'trl==0.28.0'),
    '4.3.0': ('ms-swift==4.3.0', 'transformers==5.10.4', 'tokenizers==0.22.2', 'peft==0.19.1'),
    '4.5.2': ('ms-swift==4.5.2', 'transformers==5.16.1', 'peft==0.19.1'),
}
RELEASES = tuple(PINS)  # oldest first


class OverlayError(Exception):
    """An overlay could not be made; the message ends with what pip said."""


def folder(release: str) -> Path:
    """The overlay of ``release``, one of ``RELEASES``, made if need be: some seconds, and 70 MB of disk.

    Any number of processes may ask at once: one makes it, the others wait. Raises ``OverlayError`` when pip cannot install it and
    ``ValueError`` for an unknown release.
    """
    if release not in PINS:
        raise ValueError(f'unknown release {release!r}; known: {", ".join(RELEASES)}')
    made = _root() / f'{release}-{_digest(PINS[release])}'
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        with _locked(made.with_name(f'{made.name}.lock')):
            if not made.is_dir():
                _install(release, made)
    return made


def _root() -> Path:
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'swift_speedup' / 'overlays'


def _digest(pins: tuple[str, ...]) -> str:
    """Some of the packages are compiled: another Python needs other files."""
    text = '\n'.join([*pins, sys.implementation.cache_tag, sysconfig.get_platform()])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path):
    with open(path, 'w', encoding='utf-8') as file:  # the lock ends with the process, however that ends
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(release: str, made: Path) -> None:
    """A folder with the final name is complete. The caller holds the lock, so an unfinished one is nobody's."""
    unfinished = made.with_name(f'{made.name}.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)
    # -I: an overlay that is on the path already must not be pip's business. Only what is imported gets compiled.
    command = [sys.executable, '-I', '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-compile', '--no-deps',
               '--target', str(unfinished), *PINS[release]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OverlayError(f'cannot make the overlay for ms-swift {release}: pip could not install {" ".join(PINS[release])} '
                           f'into {unfinished}; it said:\n{done.stdout[-2000:]}')
    unfinished.rename(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('releases', nargs='*', metavar='RELEASE', help=f'one of {", ".join(RELEASES)}; none: all')
    for release in parser.parse_args().releases or RELEASES:
        try:
            print(folder(release), flush=True)
        except (OverlayError, ValueError) as error:
            print(f'error: {error}', file=sys.stderr)
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
