"""The key-value cache: rows of their own length, accepted paths kept in place, storage that never moves."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.cache import GROWTH, KVCache

LAYERS, HEADS, WIDTH = 2, 3, 4


def numbered(rows: int, count: int, first: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, N, D] in which every number occurs once, from `first` on."""
    both = torch.arange(2 * rows * HEADS * count * WIDTH).view(2, rows, HEADS, count, WIDTH) + float(first)
    return both[0], both[1]


def step(cache: KVCache, count: int, first: int) -> list[tuple[Tensor, Tensor]]:
    """One pass over `count` new tokens in every row: what each layer was given; every layer must get its history back."""
    given = []
    cache.open(count)
    for layer in range(LAYERS):
        new = numbered(len(cache.lengths), count, first + 10_000 * layer)
        back = cache.update(*new, layer)
        for row, length in enumerate(cache.lengths):
            for all_, fresh in zip(back, new, strict=True):
                assert all_.shape[2] == (cache.room if cache.whole else max(cache.lengths) + count)
                assert not cache.whole or all_.is_contiguous()
                assert all_[row, :, length : length + count].equal(fresh[row])
        given.append(new)
    return given


def held(cache: KVCache) -> list[list[tuple[Tensor, Tensor]]]:
    """For every layer and row the keys and values [H, T, D] that count."""
    assert cache.store is not None
    return [
        [(pair[0][row, :, :length], pair[1][row, :, :length]) for row, length in enumerate(cache.lengths)]
        for pair in cache.store
    ]


def assert_holds(cache: KVCache, expected: list[list[tuple[Tensor, Tensor]]]) -> None:
    """The cache holds exactly the gathered twin."""
    for ours, theirs in zip(held(cache), expected, strict=True):
        for row, twin in zip(ours, theirs, strict=True):
            assert row[0].equal(twin[0])
            assert row[1].equal(twin[1])


def test_kept_paths_equal_a_cache_that_gathers_and_concatenates() -> None:
    cache = KVCache(LAYERS, 3, 40)
    nothing = torch.zeros(HEADS, 0, WIDTH)
    twin = [[(nothing, nothing) for _ in range(3)] for _ in range(LAYERS)]
    paths = [
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],  # a chain: nothing moves
        [[0, 2, 5], [0, 1, 3], [0, 4]],  # aligned before, ragged after
        [[0], [0, 3, 4, 5], [0, 5]],
        [[0, 1], [], [0, 2]],  # a free row keeps nothing
        [[0], [0], [0]],
    ]
    for turn, path in enumerate(paths):
        given = step(cache, 6, 1000 * turn)
        cache.keep(path)
        for layer in range(LAYERS):
            for row in range(3):
                nodes = path[row]
                twin[layer][row] = tuple(  # type: ignore[assignment]
                    torch.cat([old, new[row][:, nodes]], dim=1)
                    for old, new in zip(twin[layer][row], given[layer], strict=True)
                )
        assert_holds(cache, twin)
    assert cache.lengths == [11, 12, 11]


def test_prompts_fill_their_rows_and_leave_the_others_alone() -> None:
    cache = KVCache(LAYERS, 3, 16)
    step(cache, 4, 0)
    cache.keep([range(4)] * 3)
    before = [[(keys.clone(), values.clone()) for keys, values in layer] for layer in held(cache)]
    cache.fill(torch.tensor([0, 2]), torch.tensor([5, 3]))
    for layer in range(LAYERS):
        new = numbered(2, 5, 500 + 10_000 * layer)
        back = cache.update(*new, layer)
        assert back[0].equal(new[0])
        assert back[1].equal(new[1])
        before[layer][0] = (new[0][0], new[1][0])
        before[layer][2] = (new[0][1][:, :3], new[1][1][:, :3])
    assert cache.get_seq_length() == 0
    assert cache.lengths == [5, 4, 3]
    assert_holds(cache, before)
    step(cache, 2, 900)
    assert cache.get_seq_length() == 5


def test_a_pass_beyond_the_capacity_is_refused() -> None:
    cache = KVCache(LAYERS, 2, 8)
    step(cache, 5, 0)
    cache.keep([range(5), range(1)])
    step(cache, 3, 0)
    with pytest.raises(
        ValueError,
        match="the cache holds 8 tokens a row and this pass needs 9; ask for fewer new tokens or a smaller tree",
    ):
        cache.open(4)


def test_a_prompt_beyond_the_capacity_is_refused() -> None:
    cache = KVCache(LAYERS, 2, 8)
    with pytest.raises(ValueError, match="a prompt of 9 tokens does not fit a cache of 8 tokens"):
        cache.fill(torch.tensor([0, 1]), torch.tensor([3, 9]))
    assert cache.lengths == [0, 0]


def test_a_row_that_is_reset_starts_over() -> None:
    cache = KVCache(LAYERS, 2, 16)
    step(cache, 3, 0)
    cache.keep([range(3), range(2)])
    cache.reset(torch.tensor([0]))
    assert cache.lengths == [0, 2]
    given = step(cache, 2, 700)
    cache.keep([[0, 1], []])
    assert held(cache)[1][0][0].equal(given[1][0][0])
    assert cache.lengths == [2, 2]


def test_storage_is_never_moved_and_starts_as_zeros() -> None:
    cache = KVCache(LAYERS, 2, 32)
    step(cache, 3, 1)
    assert cache.store is not None
    assert not cache.store[..., 3:, :].any()
    place = cache.store.data_ptr()
    for turn in range(6):
        cache.keep([[0, 2], [0, 1][: 1 + turn % 2]])
        cache.reset(torch.tensor([turn % 2]))
        step(cache, 4, turn)
        assert cache.store.data_ptr() == place
        layers: list[Any] = cache.layers
        assert all(layer.keys.untyped_storage().data_ptr() == place for layer in layers)


def test_layers_of_different_shapes_are_refused() -> None:
    cache = KVCache(LAYERS, 1, 8)
    cache.open(2)
    cache.update(*numbered(1, 2, 0), 0)
    narrow = torch.zeros(1, HEADS, 2, WIDTH - 1)
    with pytest.raises(ValueError, match="keys and values of different shapes"):
        cache.update(narrow, narrow, 1)


def test_a_cache_in_one_piece_grows_and_shows_all_of_it() -> None:
    cache, twin = KVCache(LAYERS, 2, 3 * GROWTH // 2, whole=True), KVCache(LAYERS, 2, 3 * GROWTH // 2)
    for turn in range(4):
        for one in (cache, twin):
            step(one, 20, turn)
            one.keep([range(20), range(20 - turn)])
        assert_holds(cache, held(twin))
        assert cache.room == (GROWTH if turn < 3 else 3 * GROWTH // 2)
    with pytest.raises(ValueError, match="the cache holds 96 tokens a row and this pass needs 100"):
        cache.open(20)


@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_are_selected_take_their_text_along(whole: bool) -> None:
    cache = KVCache(LAYERS, 4, 16, whole=whole)
    step(cache, 3, 0)
    cache.keep([range(count) for count in (3, 1, 2, 3)])
    before = held(cache)
    kept = [[tuple(part.clone() for part in layer[row]) for row in (0, 3, 2)] for layer in before]
    cache.select(torch.tensor([0, 3, 2]))
    assert cache.lengths == [3, 3, 2]
    assert_holds(cache, kept)  # type: ignore[arg-type]
    given = step(cache, 1, 40)
    cache.keep([[0]] * 3)
    assert held(cache)[1][1][0][:, 3:].equal(given[1][0][1])


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_any_rounds_leave_what_a_list_of_tokens_would_hold(data: st.DataObject, rows: int, whole: bool) -> None:
    """Passes, kept paths, and rows that leave and come back with a prompt."""
    cache = KVCache(LAYERS, rows, 60, whole=whole)
    twin: list[list[list[Tensor]]] = [[[] for _ in range(rows)] for _ in range(LAYERS)]  # keys [H, D] of every token
    for turn in range(data.draw(st.integers(1, 5))):
        if turn and data.draw(st.booleans()):
            row, length = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(1, 6))
            cache.reset(torch.tensor([row]))
            cache.fill(torch.tensor([row]), torch.tensor([length]))
            for layer in range(LAYERS):
                new = numbered(1, 6, 1000 * turn + 500 + 10_000 * layer)
                cache.update(*new, layer)
                twin[layer][row] = [new[0][0][:, at] for at in range(length)]
        nodes = data.draw(st.integers(1, 6))
        fresh = step(cache, nodes, 1000 * turn)
        paths = [data.draw(st.sets(st.integers(1, nodes)).map(lambda some: [0, *sorted(some)])) for _ in range(rows)]
        paths = [[node for node in path if node < nodes][: data.draw(st.integers(0, nodes))] for path in paths]
        cache.keep(paths)
        for layer in range(LAYERS):
            for row, path in enumerate(paths):
                twin[layer][row] += [fresh[layer][0][row][:, node] for node in path]
                keys = held(cache)[layer][row][0]
                assert [keys[:, at].tolist() for at in range(keys.shape[1])] == [
                    key.tolist() for key in twin[layer][row]
                ]
