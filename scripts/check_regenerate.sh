#!/usr/bin/env bash
# Real vLLM, on the CPU, as the endpoint of regeneration: shipped prompts answered by it and in process, greedily in fp32, must have
# the same token ids. The first time it makes an environment of vLLM's own.
#   bash scripts/check_regenerate.sh                                       # SmolLM2, 20 prompts, 48 tokens
#   PROMPTS=5 bash scripts/check_regenerate.sh target=smol regenerate.tokens=160
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/vllm_environment.sh
[ $# -gt 0 ] || set -- target=smol regenerate.tokens=48
CHECK_REGENERATE=$home CHECK_PROMPTS=${PROMPTS:-20} CHECK_SERVER=$theirs/bin/python "$python" scripts/check_regenerate.py "$@"
