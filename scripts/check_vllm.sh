#!/usr/bin/env bash
# Serve a drafter in vLLM, on the GPU where there is one, else on the CPU, and compare: the texts with the target's own, and vLLM's
# counters of drafts and accepted guesses with those of our decoder in chain mode. Equal, or this fails; with DTYPE=bf16 no depth
# may be accepted in 5 % more of the rounds of one than of the other's. The first time it makes an environment of vLLM's own.
# VLLM_CPU_OMP_THREADS_BIND=nobind keeps it off the cores that others use.
#   bash scripts/check_vllm.sh conf=medusa_smol                       # more of the command line goes to the export
#   LAYOUTS=vllm,speculators PROMPTS=5 bash scripts/check_vllm.sh conf=eagle3_smol
#   bash scripts/check_vllm.sh conf=draft_model_smol                  # no export: the target's first layers, written out
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/vllm_environment.sh
export CHECK_VLLM=$home CHECK_LAYOUTS=${LAYOUTS:-vllm} CHECK_PROMPTS=${PROMPTS:-20} CHECK_DTYPE=${DTYPE:-fp32}
"$python" scripts/check_vllm.py "$@"
export VLLM_ENABLE_V1_MULTIPROCESSING=0
for layout in ${CHECK_LAYOUTS//,/ }; do
    (cd "$home" && env -u PYTHONPATH "$theirs/bin/python" "$OLDPWD/scripts/serve_vllm.py" "$home" "$layout")
done
"$python" scripts/check_vllm.py --compare "$home"
