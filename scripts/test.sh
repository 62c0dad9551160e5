#!/usr/bin/env bash
# Set up and run every check: style, types, tests (by two processes of one thread). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/mypy
OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
