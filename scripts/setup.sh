#!/usr/bin/env bash
# Make or update the environment .venv and install Outrider in it: torch from constraints.txt, then the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Outrider needs Python 3.11 or newer; set PYTHON=<python>" >&2; exit 1; }
[ -x .venv/bin/python ] || "$python" -m venv .venv
stamp=.venv/.installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "installing into .venv (a few minutes the first time) ..."
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
    touch "$stamp"
fi
