#!/usr/bin/env bash
# Usage: source scripts/install.sh EXTRA. Makes .venv with the package and that extra; does nothing when it is up to date.
extra=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $python is missing or older than 3.10; set PYTHON to a newer one" >&2; exit 1; }
stamp=.venv/.installed-$extra-$(cat setup.cfg pyproject.toml | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')
if [ ! -f "$stamp" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv || { echo "error: '$python -m venv' failed; install Python's venv module" >&2; exit 1; }
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
    touch "$stamp"
fi
