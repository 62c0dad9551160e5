"""The proposal as a tree: its mask, its depth, the published trees and the best one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tree import TokenTree, chain, ordered_paths, parents_of, published_trees
from reference import mask_by_walking

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "medusa_trees.json").read_text())


def tree_of(*rows: list[int]) -> TokenTree:
    """A tree of any tokens with the parents `rows`."""
    parents = torch.tensor(rows)
    return TokenTree(torch.zeros_like(parents), parents, torch.ones_like(parents, dtype=torch.bool))


def random_parents(nodes: int) -> st.SearchStrategy[list[int]]:
    """Parents of a tree of `nodes` nodes, in any order in which a parent comes first."""
    return st.tuples(*(st.integers(0, node - 1) for node in range(1, nodes))).map(lambda above: [-1, *above])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12).flatmap(lambda nodes: st.lists(random_parents(nodes), min_size=1, max_size=3)))
def test_mask_and_depth_equal_walking_up_the_tree(rows: list[list[int]]) -> None:
    tree = tree_of(*rows)
    walked = [mask_by_walking(parents) for parents in rows]
    assert tree.mask.tolist() == walked
    assert tree.depth.tolist() == [[sum(seen) - 1 for seen in mask] for mask in walked]


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 9, 16, 17, 33])
def test_the_last_node_of_a_chain_sees_everything(nodes: int) -> None:
    tree = tree_of(parents_of(chain(nodes - 1)))
    assert tree.mask[0].equal(torch.ones(nodes, nodes).tril().bool())
    assert tree.depth[0].tolist() == list(range(nodes))


def test_roots_propose_nothing() -> None:
    tree = TokenTree.roots(torch.tensor([7, 9]))
    assert tree.tokens.tolist() == [[7], [9]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.valid.all()
    assert tree.depth.tolist() == [[0], [0]]


@pytest.mark.parametrize("name", GOLDEN)
def test_published_medusa_trees_have_their_published_mask_and_order(name: str) -> None:
    golden = GOLDEN[name]
    paths = ordered_paths(golden["paths"])
    tree = tree_of(parents_of(paths))
    assert tree.mask[0].int().tolist() == golden["mask"]
    assert tree.depth[0].tolist() == golden["depth"]
    assert [0, *(1 + path[-1] + 10 * (len(path) - 1) for path in paths)] == golden["tree_indices"]
    leaves = set(range(len(paths) + 1)) - set(tree.parents[0].tolist())
    ours = {tuple(tree.mask[0, leaf].nonzero().flatten().tolist()) for leaf in leaves}
    assert ours == {tuple(node for node in path if node >= 0) for path in golden["retrieve_indices"]}


def test_published_trees_ship_under_their_names() -> None:
    assert published_trees() == {name: [tuple(path) for path in golden["paths"]] for name, golden in GOLDEN.items()}


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_ordered_paths_do_not_depend_on_the_order_they_were_listed_in(seed: int) -> None:
    paths = [(1,), (0,), (0, 1), (0, 0), (1, 2), (0, 1, 0)]
    shuffled = random.Random(seed).sample(paths, len(paths))
    assert ordered_paths(shuffled) == [(0,), (1,), (0, 0), (0, 1), (1, 2), (0, 1, 0)]
    assert parents_of(ordered_paths(shuffled)) == [-1, 0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ([[0], [1, 0]], r"lists \[1, 0\] without its parent \[1\]; add the parent"),
        ([[0], [0, 0, 0]], r"lists \[0, 0, 0\] without its parent \[0, 0\]; add the parent"),
        ([[0], [0, 1], [0, 1]], r"lists \[0, 1\] twice; list every node once"),
        ([[], [0]], r"lists \[\]; a path has at least one rank, and ranks start at 0"),
        ([[], [], [0]], r"lists \[\]; a path has at least one rank, and ranks start at 0"),
        ([[0], [0, -1]], r"lists \[0, -1\]; a path has at least one rank, and ranks start at 0"),
        ([[-2]], r"lists \[-2\]; a path has at least one rank, and ranks start at 0"),
    ],
)
def test_lists_that_are_no_tree_are_refused(paths: list[list[int]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ordered_paths(paths)


def test_a_chain_has_every_token_below_the_one_before_it():
    tree = TokenTree.chains(torch.tensor([[5, 6, 7], [8, 9, 5]]))
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depth.tolist() == [[0, 1, 2]] * 2
