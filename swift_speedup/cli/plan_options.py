"""Options of ``swift-speedup plan`` itself; everything else on its command line belongs to ms-swift or to the plugin."""
import argparse

from ..errors import ConfigError

_DEFAULT_BATCHES = 4
PLAN_OPTIONS = {
    '--plan_batches N': f'   FLOPs are counted on the first N batches of the dataset. Default: {_DEFAULT_BATCHES}.',
    '--plan_json FILE': '   Write the plan and the prediction to FILE too.',
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--plan_batches', type=_positive, default=_DEFAULT_BATCHES)
    parser.add_argument('--plan_json')


def check_plan_options(argv: list[str]) -> None:
    """Raises ``ConfigError`` for values that are not allowed, before anything slow is imported."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_plan_options(parser)
    parser.parse_known_args(argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(message)


def _positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not allowed; expected a positive whole number')
    return number
