"""`python scripts/serve_vllm.py FOLDER LAYOUT`, in vLLM's environment: serve what scripts/check_vllm.py exported, and count."""

import json
import sys
from pathlib import Path
from typing import Any

LOADER = {
    "enable_weights_track": False
}  # else vLLM 0.32.0 refuses the token_map that its own Medusa makes a parameter of


def serve(home: Path, layout: str) -> None:
    """Write the prompts' continuations and vLLM's counters to served_<layout>.json."""
    import vllm
    from vllm import LLM, SamplingParams

    asked = json.loads((home / "expected.json").read_text())
    llm = LLM(
        model=asked["target"],
        dtype=asked["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=asked["served"][layout],
        model_loader_extra_config=LOADER,
    )
    how = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True)
    said = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], how)
    found = {
        "version": vllm.__version__,
        "texts": [list(one.outputs[0].token_ids) for one in said],
        "counters": counted(llm.get_metrics()),
    }
    (home / f"served_{layout}.json").write_text(json.dumps(found))


def counted(metrics: list[Any]) -> dict[str, Any]:
    """What vLLM counted of its speculation."""
    held = {one.name.removeprefix("vllm:spec_decode_num_"): one for one in metrics if "spec_decode" in one.name}
    return {
        "drafts": held["drafts"].value,
        "drafted": held["draft_tokens"].value,
        "accepted": held["accepted_tokens"].value,
        "per_position": list(held["accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":  # vLLM starts processes that import this file again
    serve(Path(sys.argv[1]), sys.argv[2])
