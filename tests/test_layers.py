"""The layers of the house: who may import whom, and how long a function may be."""

import ast
import statistics
import sys
from collections import Counter

import pytest

from runs import ROOT

PACKAGES = ("conf", "models", "decode", "train")
SEES = {
    "conf": {"conf"},
    "models": {"models"},
    "decode": {"models", "decode"},
    "train": {"conf", "models", "decode", "train"},
    "scripts": {"conf", "models", "decode", "train"},
}
DOORS = {
    "decode/run.py",
    "decode/measure.py",
    "decode/arms.py",
    "decode/opening.py",
    "decode/regimes.py",
    "decode/talk.py",
    "decode/tune.py",
}  # these also read the configuration
FILES = [file for package in (*PACKAGES, "scripts") for file in sorted((ROOT / package).rglob("*.py"))]
TREES = {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in FILES}
FUNCTIONS = {
    f"{name}:{node.name}": node
    for name, tree in TREES.items()
    if not name.startswith("scripts")
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
}


def imported(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports, wherever in it."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module or "" if not node.level else "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    return {name.split(".")[0] or "." for name in names}


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def` on, its docstring left out."""
    docs = function.body[0].end_lineno - function.body[0].lineno + 1 if ast.get_docstring(function) else 0
    return function.end_lineno - function.lineno + 1 - docs


@pytest.mark.parametrize("name", TREES)
def test_a_module_imports_only_what_its_layer_sees(name):
    ours = imported(TREES[name]) & {*SEES, "tests", "."}
    assert ours <= SEES[name.split("/")[0]] | ({"conf"} if name in DOORS else set())


def test_the_configuration_does_not_load_torch():
    heavy = {"torch", "transformers", "accelerate", "numpy"}
    assert not {name for name, tree in TREES.items() if name.startswith("conf/") and imported(tree) & heavy}


def test_module_names_are_unique_and_none_hides_the_standard_library():
    names = Counter(name.split("/")[-1].removesuffix(".py") for name in TREES if not name.startswith("scripts"))
    del names["__init__"], names["__main__"]
    assert not [name for name, count in names.items() if count > 1]
    assert not set(names) & set(sys.stdlib_module_names)
    assert not set(PACKAGES) & set(sys.stdlib_module_names)


def test_functions_are_short():
    lengths = {name: length(node) for name, node in FUNCTIONS.items()}
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
    stories = {
        name: lengths[name] for name in ("decode/engine.py:rounds", "decode/engine.py:generate", "train/loop.py:fit")
    }
    assert {name: lines for name, lines in stories.items() if lines >= 45} == {}
    assert statistics.median(lengths.values()) < 10
