"""``swift-speedup patch``: gives the installed ms-swift the flag ``--frozen_speedup``, and takes it back."""
import argparse
from collections.abc import Sequence

from ..errors import ConfigError, PatchError
from ..hosts.patching import FEATURE, Installation

USAGE = """usage: swift-speedup patch                     give the installed ms-swift the flag --frozen_speedup
       swift-speedup patch --fix NAME          apply a fix of a defect of ms-swift instead; patches/README.md describes them
       swift-speedup patch --revert [--fix NAME]   take everything, or that fix, back: files are those of ms-swift again
       swift-speedup patch --check [--fix NAME]    say what is applied; status 0: the flag (the fix) is, 1: it is not,
                                               3: partly, or files were changed by others, 4: no patch for this ms-swift"""
NOT_APPLIED, DIRTY, UNSUPPORTED = 1, 3, 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f'patch: {message}\n\n{USAGE}')


def main(argv: Sequence[str]) -> int:
    """Exit status. Raises ``ConfigError`` for a wrong command line and ``PatchError`` for an ms-swift that cannot be patched."""
    if argv and argv[0] in ('-h', '--help', 'help'):
        print(USAGE)
        return 0
    parser = _Parser(prog='swift-speedup patch', add_help=False, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--revert', action='store_true')
    what.add_argument('--check', action='store_true')
    parser.add_argument('--fix', metavar='NAME')
    options = parser.parse_args(argv)
    try:
        installed = Installation()
    except PatchError as unsupported:
        if not options.check:
            raise
        print(unsupported)
        return UNSUPPORTED
    fixes = [name for name in installed.patches if name != FEATURE]
    if options.fix is not None and options.fix not in fixes:
        raise ConfigError(f'no fix {options.fix!r} for ms-swift {installed.release}; there are: {", ".join(fixes)}')
    print(f'ms-swift {installed.release} in {installed.folder}')
    if options.check:
        return _check(installed, options.fix or FEATURE)
    if options.revert:
        names = None if options.fix is None else [options.fix]
        changed = installed.revert(names)
        print(f'{options.fix or "all patches"}: {"taken back" if changed else "nothing to take back"}')
        return 0
    name = options.fix or FEATURE
    print(f'{name}: {"applied" if installed.apply(name) else "was applied already"}; swift-speedup patch --revert takes it back')
    if name == FEATURE:
        print('use it: swift sft ... --frozen_speedup true --frozen_cache_dir DIR')
    return 0


def _check(installed: Installation, asked: str) -> int:
    states = {name: installed.state(name) for name in installed.patches}
    for name, state in states.items():
        print(f'{name}: {state}')
    return {'applied': 0, 'not applied': NOT_APPLIED}.get(states[asked], DIRTY)
