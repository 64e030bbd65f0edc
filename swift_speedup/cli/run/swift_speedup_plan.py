"""``swift-speedup plan``; started by ms-swift's own launcher, in one process."""
import argparse
import sys
from pathlib import Path

from swift_speedup.cli.plan_options import add_plan_options
from swift_speedup.hosts.planning import run_plan

if __name__ == '__main__':
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--plan_command', required=True)
    add_plan_options(parser)
    options, flags = parser.parse_known_args(sys.argv[1:])
    run_plan(options.plan_command, flags, options.plan_batches, options.plan_json and Path(options.plan_json))
