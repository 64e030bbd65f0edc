#!/usr/bin/env bash
# Installs and runs the tests. Options are pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh test
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
