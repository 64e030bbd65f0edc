#!/usr/bin/env bash
# The main job: stock `swift sft` against the sped-up one on the same photographs. Options are those of scripts/demo.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh demo
exec .venv/bin/python scripts/demo.py "$@"
