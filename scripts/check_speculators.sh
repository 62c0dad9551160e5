#!/usr/bin/env bash
# Load an export with the `speculators` library's own class and compare what it says of a text with what our drafter says: the
# logits of every position and step, in fp32. Equal to 1e-5 of the largest, or this fails. The first time it makes an environment
# of that library's own in the user's cache (1.5 GB on disk).
#   bash scripts/check_speculators.sh conf=eagle31_smol       # more of the command line goes to the export
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
cache=${OUTRIDER_CACHE:-$HOME/.cache/outrider}
theirs=$cache/speculators
if [ ! -e "$theirs/.installed" ]; then
    echo "installing speculators into $theirs (minutes, once) ..."
    rm -rf "$theirs"
    python3.11 -m venv "$theirs"
    "$theirs/bin/pip" install --quiet --disable-pip-version-check -c <(echo "torch==2.13.0+cpu") speculators==0.9.0
    "$theirs/bin/pip" uninstall --quiet --yes torchvision torchaudio  # built for another torch: the import would fail
    touch "$theirs/.installed"
fi
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" CHECK_SPECULATORS=$home
"$python" scripts/check_speculators.py "$@"
(cd "$home" && env -u PYTHONPATH HF_HUB_OFFLINE=1 "$theirs/bin/python" "$OLDPWD/scripts/ask_speculators.py" "$home")
"$python" scripts/check_speculators.py --compare "$home"
