"""``swift-speedup cache why``; started by ms-swift's own launcher, in one process."""
import argparse
import sys
from pathlib import Path

from swift_speedup.hosts.why import run_why

if __name__ == '__main__':
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--why_folder', type=Path, required=True)
    parser.add_argument('--why_image', type=Path, required=True)
    parser.add_argument('--why_json', action='store_true')
    options, flags = parser.parse_known_args(sys.argv[1:])
    run_why(options.why_folder, options.why_image, flags, options.why_json)
