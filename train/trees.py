"""The static tree that suits a drafter, searched on held-out text.

`python -m train.trees conf=NAME` makes it anew for a drafter that exists, and shows what trees are worth.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from conf import command
from models.drafter import Drafter, asked
from models.search import best_tree, expected_tau, independent_tree, rates_of, tau_of
from models.shelf import Card
from train.chat import stretches
from train.features import Source

NODES = 64  # of the tree that a card recommends, root included; a measurement takes the first `decode.nodes` of them
WIDTH = 32  # picks of each depth among which the right one is looked for
SIZES = (8, 16, 32, 64)  # of the trees whose tau is forecast


def recorded(drafter: Drafter, source: Source) -> list[Tensor]:
    """For every turn of the conversations [P, K]: at which rank each depth had what was said; [] for other drafters."""
    drafter.eval()
    turns: list[Tensor] = []
    for piece in source.everything():
        batch = source.features(piece)
        ranks = drafter.ranks(batch, WIDTH)
        if ranks is None:
            return []
        (where,) = asked(batch.loss_mask, batch.document, 1)
        lengths = [end - start for row in where.tolist() for start, end in stretches(row)]
        turns += ranks.cpu().split(lengths)
    return turns


def recommend(drafter: Drafter, heldout: Source, card: Card, nodes: int = NODES) -> list[Tensor]:
    """Let `card` recommend the tree of up to `nodes` nodes that held-out text favours; the turns it was searched on."""
    turns = recorded(drafter, heldout)
    if turns:
        card.tree = [list(path) for path in best_tree(turns, nodes)]
        sizes = [size for size in SIZES if size <= nodes] if len(turns) > 1 else []
        card.forecast = {size: round(expected_tau(turns, size), 4) for size in sizes}
    return turns


def compared(turns: Sequence[Tensor]) -> Table:
    """What trees searched on every other one of `turns` promise, and what they are worth on the rest, by either search."""
    known, other = turns[::2], turns[1::2]
    rates = rates_of(known, WIDTH)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="tau forecast from one half of the text, and on the other")
    for heading in ("nodes", "joint", "there", "error", "independent", "there", "error"):
        table.add_column(heading, justify="right")
    for nodes in SIZES:
        joint = expected_tau(known, nodes), tau_of(other, best_tree(known, nodes))
        chosen = independent_tree(rates, nodes)
        alone = 1 + sum(worth for _, worth in chosen), tau_of(other, [path for path, _ in chosen])
        told = [(f"{promised:.3f}", f"{had:.3f}", f"{promised / had - 1:+.1%}") for promised, had in (joint, alone)]
        table.add_row(str(nodes), *told[0], *told[1])
    return table


if __name__ == "__main__":
    command("train.replant:replant")()
