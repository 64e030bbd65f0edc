"""``swift-speedup precompute``; started by ms-swift's own launcher, on all ranks."""
import argparse
import sys

from swift_speedup.hosts.precompute import run_precompute

if __name__ == '__main__':
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--precompute_command', required=True)
    options, flags = parser.parse_known_args(sys.argv[1:])
    run_precompute(options.precompute_command, flags)
