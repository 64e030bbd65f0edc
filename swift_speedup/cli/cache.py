"""``swift-speedup cache``: what lies in a cache folder, whether it is sound, and how to make it smaller."""
import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table

from ..errors import ConfigError
from ..memo.key import FORMAT_VERSION
from ..segments.state import numerics
from ..store import maintenance
from ..store.disk import DiskStore
from ..store.environment import DATA, Unusable
from ..store.ram import GIB

_UNITS = {'s': 1, 'm': 60, 'h': 3600, 'd': 86400, 'w': 7 * 86400}
USAGE = """usage: swift-speedup cache stats DIR [--json]           what is in the folder, by what computed it
       swift-speedup cache verify DIR [--json]          read everything, compare checksums; status 1 if something is damaged
       swift-speedup cache prune DIR [--older-than 30d] [--foreign] [--to-gib N] [--json]
                                                        drop damaged entries; old ones; those of other versions; the least used
       swift-speedup cache clear DIR                    drop everything
       swift-speedup cache why DIR --image FILE [--json] <swift flags: --model and those of the training>
                                                        is the image there, and if not, which part of its key is different
       swift-speedup cache merge DIR SOURCE...          copy into DIR what folders filled elsewhere have more"""


def main(argv: Sequence[str]) -> int:
    """Exit status. Raises ``ConfigError`` for a wrong command line or folder."""
    if not argv or argv[0] in ('-h', '--help', 'help'):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] == 'why':
        return _why(argv[1:])
    options = _parser().parse_args(argv)
    try:
        return _COMMANDS[options.command](options)
    except Unusable as trouble:
        raise ConfigError(str(trouble)) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f'cache: {message}\n\n{USAGE}')


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog='swift-speedup cache', add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(dest='command', required=True, parser_class=_Parser)
    for name in _COMMANDS:
        command = commands.add_parser(name, add_help=False, allow_abbrev=False)
        command.add_argument('folder', type=Path)
        if name == 'merge':
            command.add_argument('sources', type=Path, nargs='+')
        if name in ('stats', 'verify', 'prune'):
            command.add_argument('--json', action='store_true')
        if name == 'prune':
            command.add_argument('--older-than', type=_age)
            command.add_argument('--foreign', action='store_true')
            command.add_argument('--to-gib', type=_gib)
    return parser


def _age(text: str) -> float:
    found = re.fullmatch(r'(\d+(?:\.\d+)?)([smhdw])', text)
    if found is None:
        raise argparse.ArgumentTypeError(f'{text!r} is no age; write 12h, 30d or 8w')
    return float(found.group(1)) * _UNITS[found.group(2)]


def _gib(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float('inf'):
        raise argparse.ArgumentTypeError(f'{text!r} is no number of GiB')
    return number


@contextmanager
def _opened(folder: Path, writable: bool) -> Iterator[DiskStore]:
    if not (folder / DATA).exists():  # nothing is made by looking
        raise ConfigError(f'{folder} holds no cache' if folder.exists() else f'{folder} does not exist')
    store = DiskStore(folder, writable=writable)
    try:
        if writable and not store.keeps:
            raise ConfigError(f'{folder} cannot be written to')
        yield store
    finally:
        store.close()


@contextmanager
def _progress(text: str, shown: bool) -> Iterator[Any]:
    with Progress(*Progress.get_default_columns()[:-1], TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _foreign(group: maintenance.Group) -> list[str]:
    return maintenance.differences(group, FORMAT_VERSION, numerics(None)[:2])  # torch and transformers; a device is not known here


def _stats(options: argparse.Namespace) -> int:
    with _opened(options.folder, writable=False) as store:
        groups, damaged = maintenance.survey(store)
        count, nbytes = store.totals()
    size = (options.folder / DATA).stat().st_size
    if options.json:
        described = [group.to_dict() | {'foreign': _foreign(group)} for group in groups]
        print(json.dumps({
            'entries': count, 'bytes': nbytes, 'file_bytes': size, 'damaged': len(damaged), 'groups': described}, indent=2))
        return 0
    table = Table('segments', 'weights', 'entries', 'GiB', 'written', 'usable here', title=f'{options.folder}')
    for group in groups:
        names = ' + '.join(group.segments) or '?'
        weights = ' '.join(str(about.get('weights', '?'))[:8] for about in group.segments.values())
        table.add_row(names, weights, f'{group.entries:,}', f'{group.nbytes / GIB:.3f}', _dates(group),
                      '; '.join(_foreign(group)) or 'yes')
    Console().print(table)
    print(f'{count:,} entries, {nbytes / GIB:.3f} GiB; the file has {size / GIB:.3f} GiB; {len(damaged)} damaged (headers only: verify '
          'reads everything)')
    return 0


def _dates(group: maintenance.Group) -> str:
    first, last = (time.strftime('%Y-%m-%d', time.localtime(seconds)) for seconds in (group.oldest, group.newest))
    return first if first == last else f'{first} to {last}'


def _verify(options: argparse.Namespace) -> int:
    with _opened(options.folder, writable=False) as store, _progress('checksums', not options.json) as progress:
        count = len(store)
        bad = store.check(progress)
    if options.json:
        print(json.dumps({'entries': count, 'damaged': [key.hex() for key in bad]}))
    else:
        print(f'{count:,} entries, {len(bad)} damaged' + (': they are computed again when needed; prune drops them' if bad else ''))
    return int(bool(bad))


def _prune(options: argparse.Namespace) -> int:
    to_bytes = None if options.to_gib is None else int(options.to_gib * GIB)
    unwanted = (lambda group: bool(_foreign(group))) if options.foreign else (lambda group: False)
    with _opened(options.folder, writable=True) as store:
        entries, nbytes = maintenance.prune(store, options.older_than, unwanted, to_bytes)
    print(json.dumps({'entries': entries, 'bytes': nbytes}) if options.json else
          f'{entries:,} entries dropped, {nbytes / GIB:.3f} GiB; the file keeps its size and uses the room again')
    return 0


def _clear(options: argparse.Namespace) -> int:
    with _opened(options.folder, writable=True) as store:
        count = len(store)
        store.clear()
    print(f'{count:,} entries dropped')
    return 0


def _merge(options: argparse.Namespace) -> int:
    copied = 0
    target = DiskStore(options.folder)
    try:
        if not target.keeps:
            raise ConfigError(f'{options.folder} cannot be written to')
        for folder in options.sources:
            if folder.resolve() == options.folder.resolve():
                raise ConfigError(f'{folder} cannot be merged into itself')
            with _opened(folder, writable=False) as source, _progress(str(folder), True) as progress:
                copied += maintenance.merge(target, source, progress)
        lost: Optional[int] = target.errors or None
    finally:
        target.close()
    print(f'{copied:,} entries copied')
    return int(lost is not None)


def _why(argv: Sequence[str]) -> int:
    parser = _Parser(prog='swift-speedup cache why', add_help=False, allow_abbrev=False)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--image', type=Path, required=True)
    parser.add_argument('--json', action='store_true')
    options, flags = parser.parse_known_args(argv)
    with _opened(options.folder, writable=False):
        pass
    if not options.image.is_file():
        raise ConfigError(f'{options.image} is not a file')
    if not any(flag.partition('=')[0] == '--model' for flag in flags):
        raise ConfigError('cache why needs --model, and the flags of the training that change what the model is or sees')
    from swift.cli.main import cli_main  # slow to import
    sys.argv = ['swift-speedup', 'why', *flags, '--why_folder', str(options.folder), '--why_image', str(options.image),
                *(['--why_json'] if options.json else [])]
    cli_main(route_mapping={'why': 'swift_speedup.cli.run.swift_speedup_why'})
    return 0


_COMMANDS = {'stats': _stats, 'verify': _verify, 'prune': _prune, 'clear': _clear, 'merge': _merge}
