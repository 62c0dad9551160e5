"""The curve of verification: which sizes, what lies between, and that the passes are those of real trees."""

import pytest

from conftest import Family
from decode.cost import REPEATS, Cost, Ladder, sizes


def test_sizes_go_by_halves_of_an_octave_up_to_what_is_used():
    assert sizes(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert sizes(17) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert sizes(1) == [1]
    assert all(sizes(largest)[-1] >= largest for largest in range(1, 200))


def test_between_measured_sizes_the_curve_is_straight_and_beyond_them_it_goes_on():
    cost = Cost([1, 2, 4, 8], [10.0, 12.0, 13.0, 21.0])
    assert [cost.at(nodes) for nodes in (1, 2, 4, 8)] == cost.ms
    assert (cost.at(3), cost.at(5), cost.at(1.5)) == (12.5, 15.0, 11.0)
    assert cost.at(10) == 25.0


@pytest.mark.parametrize("rows", [1, 3])
def test_every_climb_times_each_size_once_and_leaves_the_text_alone(llama: Family, rows: int) -> None:
    ladder = Ladder(llama.target, rows, context=20, largest=10)
    widths: list[tuple[int, ...]] = []
    hook = llama.target.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: widths.append(tuple(args[0].shape))
    )
    ladder.climb()
    cost = ladder.cost()
    hook.remove()
    assert cost.nodes == [1, 2, 3, 4, 6, 8, 12, 16]
    assert widths == [(rows, size) for _ in range(REPEATS) for size in cost.nodes]
    assert all(ms > 0 for ms in cost.ms)
    assert ladder.cache.lengths == [20] * rows


def test_the_curve_fits_a_target_with_little_context(llama: Family) -> None:
    ladder = Ladder(llama.target, 1, context=400, largest=20)
    assert ladder.cache.lengths == [llama.target.context - 24]
