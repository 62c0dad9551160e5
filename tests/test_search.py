"""Trees made for a drafter: replay equals decoding, either search finds the best tree, and the card gets what was found."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.engine import generate
from decode.figures import tokens_of
from models.drafter import Budget, Plain
from models.medusa import Medusa
from models.search import best_tree, expected_tau, independent_tree, rates_of, replayed, tau_of
from models.shelf import Card, read_card, save_drafter, write_card
from models.target import Target
from models.tree import Path as Ranks
from models.tree import chain, ordered_paths
from reference import grown_by_replaying, likeliest, most_worth, worth
from runs import composed
from train import replant
from train.chat import Example
from train.features import Live, Source
from train.trees import compared, recorded

EXACT = ("target.dtype=fp32", "optim.precision=fp32")
LIMIT = 20


def turns(count: int, depths: int = 3, width: int = 3, seed: int = 0) -> list[Tensor]:
    """Turns of random ranks, deeper ones right less often."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5 + 3 * (at % 4) for at in range(count)]
    return [torch.randint(-1, width, (length, depths), generator=generator) for length in lengths]


def medusa(target: Target, vocabulary: int | None = None) -> Medusa:
    torch.manual_seed(1)
    drafter = Medusa(target.ends, heads=3, vocabulary=vocabulary)
    drafter.learn_vocabulary(torch.arange(target.identity.vocabulary))
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return drafter.eval()


def test_replayed_text_takes_the_passes_that_decoding_it_takes(llama):
    target, drafter = llama.target, medusa(llama.target, vocabulary=150)
    prompts = [random.Random(seed).choices(range(200), k=3 + seed) for seed in range(4)]
    texts = [one.tokens for one in generate(target, Plain(), prompts, LIMIT, Budget(nodes=1)).generations]
    asked = [
        Example([*prompt, *text], [False] * len(prompt) + [True] * len(text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    source = Source(asked, Live(target), 4, 0)
    known = recorded(drafter, source)
    lengths = sorted(len(text) - 1 for text in texts)
    assert sorted(map(len, known)) == lengths
    trees = [best_tree(known, 7), best_tree(known, 40), ordered_paths([[4], [2], [2, 1]])]
    passes = []
    for paths in trees:
        run = generate(target, drafter, prompts, LIMIT, Budget(tuple(ordered_paths(paths)), len(paths) + 1), rows=2)
        assert [one.tokens for one in run.generations] == texts
        assert replayed(known, paths) == (tokens_of(run), sum(len(one.steps) for one in run.generations))
        passes.append(sum(len(one.steps) for one in run.generations))
    assert passes[1] < 0.9 * sum(lengths)  # guesses were right often enough to tell


def test_what_stands_beyond_the_end_of_a_turn_is_not_counted():
    sure = torch.zeros(4, 3, dtype=torch.long)
    assert replayed([sure], chain(3)) == (4, 1)
    assert replayed([sure, sure[:1]], chain(3)) == (5, 2)
    assert replayed([sure], chain(1)) == (4, 2)
    assert tau_of([sure], chain(1)) == 2.0


def test_expected_tau_is_that_of_trees_chosen_on_other_turns():
    """The even turns favour pick 0, the odd ones pick 1: each is judged with the other's tree, and nothing is accepted."""
    even, odd = torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1, dtype=torch.long)
    assert tau_of([even, even], best_tree([even], 2)) == 2.0
    assert expected_tau([even, odd, even, odd], 2) == 1.0
    assert expected_tau([even, even, even], 2) == 2.0
    with pytest.raises(ValueError, match="one turn of text says nothing"):
        expected_tau([even], 2)


@pytest.mark.parametrize(
    ("depths", "width", "nodes"), [(1, 4, 3), (2, 3, 5), (3, 2, 5), (3, 2, 7), (2, 3, 2), (2, 2, 1)]
)
@pytest.mark.parametrize("seed", range(4))
def test_of_single_rounds_the_best_tree_is_worth_as_much_as_any(depths, width, nodes, seed):
    ranks = torch.randint(-1, width, (200, depths), generator=torch.Generator().manual_seed(seed))
    paths = best_tree(ranks.split(1), nodes)
    assert len(paths) == nodes - 1
    assert sorted(ordered_paths(paths)) == sorted(paths)
    assert worth(ranks.tolist(), paths) == most_worth(ranks.tolist(), width, nodes)


def test_best_tree_cut_short_is_the_best_smaller_tree():
    ranks = torch.randint(-1, 3, (200, 3), generator=torch.Generator().manual_seed(9))
    paths = best_tree(ranks.split(1), 9)
    for nodes in range(2, 6):
        assert ordered_paths(paths[: nodes - 1])
        assert worth(ranks.tolist(), paths[: nodes - 1]) == most_worth(ranks.tolist(), 3, nodes)


def test_best_tree_sees_that_depths_depend_on_each_other():
    """Where only the second pick is ever followed by a right guess, that is where the tree goes deep."""
    ranks = torch.tensor([[0, -1]] * 5 + [[1, 2]] * 4)
    assert best_tree(ranks.split(1), 4) == [(0,), (1,), (1, 2)]


def test_best_tree_gives_all_there_is_where_more_is_asked():
    assert best_tree(torch.tensor([[1, 0], [0, -1], [-1, 0]]).split(1), 100) == [(0,), (1,), (1, 0)]


def test_best_tree_of_a_text_that_favours_nothing_is_the_chain_of_first_picks():
    assert best_tree(torch.full((3, 4), -1).split(1), 10) == chain(4)


def test_best_tree_of_a_sure_first_pick_is_a_chain():
    assert best_tree(torch.tensor([[0, 0, 0, 0]] * 4).split(1), 5) == chain(4)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_tree_grows_where_most_rounds_would_have_gone_on(seed):
    known = turns(9, seed=seed)
    assert best_tree(known, 8) == grown_by_replaying([turn.tolist() for turn in known], 3, 8)
    assert best_tree(known, 5) == best_tree(known, 8)[:4]


def test_rounds_that_never_begin_somewhere_do_not_count_there():
    """Every other position has pick 1 right, but no round begins there once pick 0 is in the tree."""
    known = [torch.tensor([[0], [1], [0], [1], [0], [1], [2]])]
    assert best_tree(known, 3) == [(0,), (2,)]
    assert best_tree(torch.cat(known).split(1), 3) == [(0,), (1,)]


@pytest.mark.parametrize(("nodes", "seed"), [(1, 0), (2, 0), (4, 0), (4, 1), (5, 2), (5, 3)])
def test_the_independent_tree_is_the_likeliest_of_all(nodes, seed):
    rates = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2
    found = independent_tree(rates, nodes)
    assert len(found) == nodes - 1
    ordered_paths(path for path, _ in found)
    assert sum(worth for _, worth in found) == pytest.approx(likeliest(rates.tolist(), nodes))
    assert [worth for _, worth in found] == sorted((worth for _, worth in found), reverse=True)
    for path, chance in found:
        assert chance == pytest.approx(torch.tensor([rates[k, rank] for k, rank in enumerate(path)]).prod().item())


def test_the_independent_tree_gives_all_there_is_where_more_is_asked():
    rates = torch.tensor([[0.5, 0.0], [0.25, 0.5]])
    paths = [path for path, _ in independent_tree(rates, 100)]
    assert sorted(paths) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert paths[:2] == [(0,), (0, 1)]  # the likelier pick first, whatever its rank


def test_rates_count_each_depth_for_itself():
    assert rates_of([torch.tensor([[0, 1], [0, -1]]), torch.tensor([[1, 1], [-1, 0]])], 2).tolist() == [
        [0.5, 0.25],
        [0.25, 0.5],
    ]


def test_heads_that_are_independent_make_both_searches_agree():
    """On text whose depths are right independently, the product of rates is the truth; where they hang together, it is not."""
    generator = torch.Generator().manual_seed(4)
    apart = [torch.randint(-1, 2, (400, 2), generator=generator) for _ in range(8)]
    paths = independent_tree(rates_of(apart, 2), 4)
    assert 1 + sum(worth for _, worth in paths) == pytest.approx(tau_of(apart, [path for path, _ in paths]), rel=0.03)
    together = [turn[:, :1].expand(-1, 2) for turn in apart]
    paths = independent_tree(rates_of(together, 2), 4)
    assert 1 + sum(worth for _, worth in paths) < 0.95 * tau_of(together, best_tree(together, 4))


def trained(folder: Path, run) -> Path:
    """A drafter of the tiny target with a card that recommends a poor tree."""
    from decode.opening import open_target

    target = open_target(run.target)
    torch.manual_seed(2)
    drafter = Medusa(target.ends, heads=2)
    card = Card("models.medusa.Medusa", {"heads": 2}, vars(target.identity), [], [[7], [7, 7]], {"conf": "mine"})
    save_drafter(drafter, card, folder)
    return folder


def searched(tmp_path: Path, *overrides: str):
    return composed(*EXACT, f"out={tmp_path}/out", "data.heldout=5", "decode.nodes=70", *overrides)


def test_the_command_writes_a_new_tree_and_nothing_else_into_the_card(tmp_path, capsys):
    run = searched(tmp_path)
    folder = trained(tmp_path / "out", run)
    before, weights = read_card(folder), (folder / "model.safetensors").read_bytes()
    replant.replant(run)
    after = read_card(folder)
    assert after.tree != before.tree
    assert ordered_paths(after.tree)
    assert after.forecast.keys() == {8, 16, 32, 64}
    assert list(after.forecast.values()) == sorted(after.forecast.values())
    changed = {name for name, value in vars(after).items() if value != getattr(before, name)}
    assert changed == {"tree", "forecast"}
    assert (folder / "model.safetensors").read_bytes() == weights
    assert "tau forecast from one half" in capsys.readouterr().out


def test_a_drafter_from_elsewhere_is_copied_with_its_new_tree(tmp_path):
    run = searched(tmp_path, f"trained={tmp_path}/theirs")
    theirs = trained(tmp_path / "theirs", run)
    kept = [(file.name, file.read_bytes()) for file in sorted(theirs.iterdir())]
    replant.replant(run)
    assert [(file.name, file.read_bytes()) for file in sorted(theirs.iterdir())] == kept
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == kept[1][1]
    assert read_card(tmp_path / "out").training == {"conf": "mine"}
    with pytest.raises(ValueError, match=r"holds another drafter than .*theirs; choose out=, or overwrite=true"):
        replant.replant(run)


def test_drafters_without_a_static_tree_are_told_so(tmp_path):
    with pytest.raises(ValueError, match=r"models.ngram.Ngram needs no training and has no card; set decode.tree"):
        replant.replant(composed(*EXACT, f"out={tmp_path}", "drafter=ngram"))
    target = {"name": "n", "fingerprint": "f", "width": 1}
    write_card(Card("models.eagle3.Eagle3", {}, target, [2]), tmp_path)
    with pytest.raises(ValueError, match=r"models.eagle3.Eagle3 grows its trees as it drafts and has no static one"):
        replant.replant(composed(*EXACT, f"out={tmp_path}"))


def test_the_table_sets_each_forecast_beside_what_it_was_worth():
    known = turns(12)
    table = compared(known)
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert [row[0] for row in rows] == ["8", "16", "32", "64"]
    tree: list[Ranks] = best_tree(known[::2], 8)
    assert rows[0][1] == f"{expected_tau(known[::2], 8):.3f}"
    assert rows[0][2] == f"{tau_of(known[1::2], tree):.3f}"
    assert rows[0][3] == f"{expected_tau(known[::2], 8) / tau_of(known[1::2], tree) - 1:+.1%}"
