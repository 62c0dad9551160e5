"""Answer shipped prompts in process and by a vLLM that this starts, and compare: scripts/check_regenerate.sh says how."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from conf import command
from conf.schema import Run
from decode.opening import served_folder
from train.data import write_rows
from train.regenerate import answer
from train.sources import conversations_of

SHIPPED = "pkg://train/corpus/smol.jsonl.gz"
STARTING = 600  # seconds that vLLM may take to start
HOW = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 4 --max-num-batched-tokens 1024"


def check(run: Run) -> None:
    """Raise ValueError where an answer differs. CHECK_REGENERATE names a folder, CHECK_PROMPTS how many, CHECK_SERVER vLLM's Python."""
    home, how = Path(os.environ["CHECK_REGENERATE"]), run.regenerate
    rows = islice(conversations_of(SHIPPED), int(os.environ["CHECK_PROMPTS"]))
    write_rows(home / "prompts.jsonl", ({"id": n, "messages": row["messages"][:1]} for n, row in enumerate(rows)))
    run.target.dtype, how.prompts, how.rows, how.temperature = "fp32", str(home / "prompts.jsonl"), 4, 0.0
    ours = answers(run, home / "inside.jsonl")
    with serving(served_folder(run.target), home) as how.url:
        theirs = answers(run, home / "served.jsonl")
    apart = [number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    tokens = sum(map(len, ours))
    print(
        f"{len(ours)} answers, {tokens} tokens: {len(ours) - len(apart)} have the same token ids from vLLM as in process"
    )
    if apart:
        raise ValueError(f"answers {apart} differ")


def answers(run: Run, out: Path) -> list[list[int]]:
    """The token ids of every answer."""
    run.regenerate.out = str(out)
    answer(run)
    return [json.loads(line)["messages"][-1]["ids"] for line in out.read_text().splitlines()]


@contextmanager
def serving(folder: Path, home: Path) -> Iterator[str]:
    """The address of vLLM serving `folder`, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]  # the wheel for CPUs has another name, at which its command fails
    words = [os.environ["CHECK_SERVER"], *module, "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen([*words, *HOW.split()], cwd=home, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        wait(url, server, home / "server.log")
        yield url
    finally:
        server.terminate()
        server.wait(60)


def wait(url: str, server: "subprocess.Popen[Any]", log: Path) -> None:
    """Until it answers. Raises ValueError where it ends, or takes too long."""
    end = time.monotonic() + STARTING
    while time.monotonic() < end and server.poll() is None:
        try:
            urlopen(f"{url}/models", timeout=5).close()
        except (URLError, OSError):
            time.sleep(1)
        else:
            return
    raise ValueError(f"vLLM did not start: {log.read_text(errors='replace')[-500:]}")


main = command("check_regenerate:check")

if __name__ == "__main__":
    main()
