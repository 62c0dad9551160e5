#!/usr/bin/env bash
# Load an export with the `speculators` library's own class and compare what it says of a text with what our drafter says: the
# logits of every position and step, in fp32. Equal to 1e-5 of the largest, or this fails. The first time it makes an environment
# of that library's own in the user's cache (1.5 GB on disk).
#   bash scripts/check_speculators.sh conf=eagle31_smol       # more of the command line goes to the export
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/other_program.sh
environment speculators speculators==0.9.0 torchvision torchaudio
export CHECK_SPECULATORS=$home
"$python" scripts/check_speculators.py "$@"
(cd "$home" && env -u PYTHONPATH HF_HUB_OFFLINE=1 "$theirs/bin/python" "$OLDPWD/scripts/ask_speculators.py" "$home")
"$python" scripts/check_speculators.py --compare "$home"
