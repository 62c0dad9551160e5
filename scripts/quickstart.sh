#!/usr/bin/env bash
# From nothing to a measured drafter: environment, target, Medusa heads, and the table of plain against Medusa.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/python -m train conf=medusa_smol overwrite=true
.venv/bin/python decode/run.py conf=medusa_smol
