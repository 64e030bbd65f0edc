"""The console command: checks ``--frozen_*`` flags, then lets ms-swift's launcher do what ``swift`` would."""
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ..config import FLAG_PREFIX, SpeedupConfig, flag_name, option_fields
from ..errors import ConfigError, SpeedupError
from .plan_options import PLAN_OPTIONS, check_plan_options

_TRAINING = ('sft', 'pt', 'rlhf')


def main(argv: Optional[list[str]] = None) -> int:
    """Exit status: 0, 2 for a wrong command line, else that of the training process."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ''
    try:
        if command in _TRAINING:
            return _train(command, argv[1:])
        if command == 'plan':
            return _plan(argv[1:])
        if command == 'precompute':
            return _precompute(argv[1:])
        if command == 'cache':
            from . import cache  # torch is slow to import
            return cache.main(argv[1:])
        if command == 'patch':
            from . import patch
            return patch.main(argv[1:])
        if command == 'plugin' and not argv[1:]:
            print(plugin_path())
            return 0
        if command in ('-h', '--help', 'help'):
            print(usage())
            return 0
    except SpeedupError as error:
        print(f'swift-speedup: error: {error}', file=sys.stderr)
        return 2
    print(f'swift-speedup: error: {"unknown command " + repr(" ".join(argv)) if argv else "no command"}\n\n{usage()}', file=sys.stderr)
    return 2


def usage() -> str:
    lines = ['usage: swift-speedup sft|pt|rlhf <every swift flag> [options]  train with the plugin, ms-swift unpatched',
             '       swift-speedup plan [sft|pt|rlhf] <the same flags>       what would be skipped and cached, and the gain that',
             '                                                               FLOPs predict; loads no weights, trains nothing',
             '       swift-speedup precompute [sft|pt|rlhf] <the same flags> fill the folder of --frozen_cache_dir without training',
             '       swift-speedup cache stats|verify|prune|clear|merge|why DIR   what lies in a cache folder; see cache --help',
             '       swift-speedup patch [--revert|--check] [--fix NAME]     give the installed ms-swift the flag --frozen_speedup',
             '       swift-speedup plugin                                    path of the file for swift --external_plugins',
             '', 'options:']
    for option in option_fields():
        lines.append(f'  {flag_name(option.name)} VALUE   {option.metadata["help"]} Allowed: {option.metadata["allowed"]}.')
    lines += ['', 'options of plan:', *(f'  {name} {text}' for name, text in PLAN_OPTIONS.items())]
    return '\n'.join(lines)


def plugin_path() -> Path:
    """The file for ``--external_plugins``, alone in its folder: ms-swift makes that folder importable."""
    return Path(__file__).resolve().parent.parent / 'plugin' / 'swift_speedup_plugin.py'


def _train(command: str, argv: list[str]) -> int:
    SpeedupConfig.from_named(dict(_frozen_flags(argv)), flag_name)
    from swift.cli.main import cli_main  # slow to import: only when there is something to run
    sys.argv = ['swift-speedup', command, *argv]
    cli_main(route_mapping={name: f'swift_speedup.cli.run.swift_speedup_{name}' for name in _TRAINING})
    return 0


def _plan(argv: list[str]) -> int:
    command, flags = _split(argv, 'plan')
    check_plan_options(flags)
    from swift.cli.main import cli_main
    sys.argv = ['swift-speedup', 'plan', *flags, '--plan_command', command]
    cli_main(route_mapping={'plan': 'swift_speedup.cli.run.swift_speedup_plan'})
    return 0


def _precompute(argv: list[str]) -> int:
    command, flags = _split(argv, 'precompute')
    if 'cache_dir' not in dict(_frozen_flags(flags)):
        raise ConfigError(f'precompute fills a folder: add {flag_name("cache_dir")} DIR')
    from swift.cli.main import cli_main
    # By the training's own name: ms-swift's launcher starts several ranks for some names only.
    sys.argv = ['swift-speedup', command, *flags, '--precompute_command', command]
    cli_main(route_mapping={command: 'swift_speedup.cli.run.swift_speedup_precompute'})
    return 0


def _split(argv: list[str], name: str) -> tuple[str, list[str]]:
    """Which training is meant, and its flags, checked."""
    command, flags = (argv[0], argv[1:]) if argv and argv[0] in _TRAINING else ('sft', argv)
    if not flags:
        raise ConfigError(f'{name} needs the flags of the training that is meant, such as --model and --dataset')
    SpeedupConfig.from_named(dict(_frozen_flags(flags)), flag_name)
    return command, flags


def _frozen_flags(argv: list[str]) -> Iterator[tuple[str, str]]:
    """``(field, value)`` of the plugin's flags, from the command line and from the yaml or json file it may begin with."""
    if argv and argv[0].endswith(('.json', '.yaml', '.yml')):
        for name, value in _read(Path(argv[0])).items():
            if str(name).startswith(FLAG_PREFIX):
                yield name[len(FLAG_PREFIX):], value
    for place, word in enumerate(argv):
        if not word.startswith(f'--{FLAG_PREFIX}') and not word.startswith('--frozen-'):
            continue
        name, has_value, value = word[2:].partition('=')
        field = name.replace('-', '_')[len(FLAG_PREFIX):]
        if not has_value:
            following = argv[place + 1:place + 2]
            if not following or following[0].startswith('--'):
                raise ConfigError(f'{word} has no value; write {word} VALUE')
            value = following[0]
        yield field, value


def _read(path: Path) -> dict:
    try:
        text = path.read_text(encoding='utf-8')
        if path.suffix == '.json':
            contents = json.loads(text)
        else:
            import yaml
            contents = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f'cannot read the configuration file {path}: {error}') from error
    except Exception as error:  # yaml has its own family of errors
        raise ConfigError(f'{path} is not valid yaml: {error}') from error
    return contents if isinstance(contents, dict) else {}


if __name__ == '__main__':
    sys.exit(main())
