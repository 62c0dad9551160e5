"""The operations of models/native.cpp, compiled by the machine's own C++ compiler, once: a whole layer, products, norms, picks.

What stands between a small layer's products takes as long as they do while it is a dozen operations, most of which
find their code and their inputs out of the processor's caches. V vocabulary.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from models.files import made_once

SOURCE = Path(__file__).with_name("native.cpp")
# sums in any order, as every kernel has them; not -ffast-math, which changes the processor's rounding for everybody
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++20",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-w",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
]
LIBRARY = "layer.so"


def unable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why layers cannot be compiled for `device` and `dtype` here; None where they can."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"it is for bf16 on a CPU, and the target is in {str(dtype).removeprefix('torch.')} on {device}"
    if not torch.cpu._is_avx512_bf16_supported():
        return "this processor has no AVX512-BF16"
    if compiler() is None:
        return "there is no C++ compiler: neither $CXX nor g++ or clang++ was found"
    return None


def compiles(wanted: bool | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are compiled: where they can be, unless `wanted` is False. Raises ValueError where it is True and they cannot."""
    if wanted is False:
        return False
    if reason := unable(device, dtype):
        if wanted:
            raise ValueError(f"target.compile=true cannot be: {reason}; leave it out")
        return False
    try:
        operations()
    except ValueError as error:
        if wanted:
            raise
        print(f"note: layers stay uncompiled: {error}", file=sys.stderr, flush=True)
        return False
    return True


def compiler() -> str | None:
    """The C++ compiler of this machine: $CXX, or the one that is found."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


@functools.cache
def operations() -> Any:
    """The operations of native.cpp. Raises ValueError where the compiler refuses it."""
    torch.ops.load_library(str(compiled() / LIBRARY))
    return torch.ops.outrider


def compiled() -> Path:
    """The folder of the library for this source, torch and processor."""
    listed = Path("/proc/cpuinfo")
    features = [line for line in listed.read_text().splitlines() if line.startswith(("flags", "model"))][:3]
    told = (SOURCE.read_text(), torch.__version__, compiler(), FLAGS, features)
    return made_once(f"layer-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}", _compile, "compiled")


def _compile(folder: Path) -> None:
    print("compiling the layer for this machine, once (10 seconds) ...", file=sys.stderr, flush=True)
    found = compiler()
    assert found is not None
    folders = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [found, *FLAGS, abi, str(SOURCE), *folders, "-ltorch_cpu", "-lc10", "-o", str(folder / LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise ValueError(f"{found} could not compile {SOURCE.name} ({said})")


def serves(states: Tensor) -> bool:
    """Whether the operations are in use here and made for such `states`."""
    return operations.cache_info().currsize > 0 and states.dtype == torch.bfloat16 and states.device.type == "cpu"


def lay_out(weight: Tensor) -> Tensor:
    """`weight` [out, in] as `product` reads it; `in` is even."""
    laid: Tensor = operations().lay_out.default(weight)
    return laid


def product(states: Tensor, laid: Tensor, out: int, bias: Tensor | None, plus: Tensor | None) -> Tensor:
    """`states` [..., in] times a weight that was `laid` out for `out` outputs, with `bias` [out] and `plus` [..., out] added.

    What it makes of a row does not depend on how many there are.
    """
    made: Tensor = operations().product.default(states, laid, out, bias, plus)
    return made


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`states` [..., width] divided by their root mean square, times `weight`."""
    made: Tensor = operations().norm.default(states, weight, eps)
    return made


def likeliest(logits: Tensor, count: int, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The log-probabilities [..., count] and places of the highest of `logits` [..., V], the first of equals first;
    `offsets` [V] are added to the places."""
    log_probs, picks = operations().likeliest.default(logits, count, offsets)
    return log_probs, picks
