#!/usr/bin/env bash
# From nothing to measured drafters: environment, target, Medusa heads, EAGLE-3, and one table of them and plain decoding.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/python -m train conf=eagle31_smol overwrite=true
.venv/bin/python -m train conf=medusa_smol overwrite=true  # finds on disk what the target read for EAGLE-3
.venv/bin/python decode/run.py conf=eagle31_smol 'decode.beside=[medusa_smol]'
