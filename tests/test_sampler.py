"""Which rows teach when, and which conversations share one."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from conftest import Family
from reference import fewest_rows
from train.chat import Example
from train.features import Live, Source, laid_out
from train.sampler import packed_rows
from train.store import open_store

chance = random.Random(3)


def talk(*lengths: int) -> list[Example]:
    return [
        Example([chance.randrange(256) for _ in range(length)], [at > 1 for at in range(length)]) for length in lengths
    ]


@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], [1, 2, 3, 4, 5, 6], [4, 4, 4, 3, 3, 3], [8, 1, 8, 1, 2, 6]])
def test_every_conversation_stands_in_one_row_and_no_row_is_over_its_room(lengths: list[int]) -> None:
    rows = packed_rows(lengths, room=8)
    assert sorted(at for row in rows for at in row) == list(range(len(lengths)))
    assert max(sum(lengths[at] for at in row) for row in rows) <= 8
    assert len(rows) <= fewest_rows(lengths, 8) * 11 / 9 + 1


def test_rows_of_many_conversations_are_nearly_full() -> None:
    lengths = [chance.randint(20, 256) for _ in range(2000)]
    assert len(packed_rows(lengths, 512)) <= 1.02 * math.ceil(sum(lengths) / 512)


def test_a_conversation_that_has_no_room_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a conversation has 9 tokens and data\.packing=8; raise it, or lower data\.longest"
    ):
        packed_rows([3, 9], 8)


def test_documents_are_numbered_and_begin_at_position_zero() -> None:
    first, second, third = talk(3, 2, 4)
    ids, mask, document, position = laid_out([[first, second], [third]])
    assert ids.tolist() == [[*first.input_ids, *second.input_ids], [*third.input_ids, 0]]
    assert mask.tolist() == [[False, False, True, False, False], [False, False, True, True, False]]
    assert document.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert position.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


def alone(family: Family, examples: Sequence[Example]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What transformers makes of each conversation by itself: the taps 1 and 2, and the final hidden state."""
    said = []
    for one in examples:
        out = family.stock(input_ids=torch.tensor([one.input_ids]), use_cache=False, output_hidden_states=True)
        said.append((torch.cat(out.hidden_states[1:3], dim=-1)[0], out.hidden_states[-1][0]))
    return said


@torch.inference_mode()
def test_the_target_reads_every_document_of_a_row_by_itself(family: Family) -> None:
    """The documents are longer than the windows of those layers that have one."""
    examples = talk(14, 9, 3, 21)
    family.target.tap((1, 2))
    batch = Live(family.target).read([[examples[at] for at in row] for row in ([0, 2, 1], [3])])
    starts = {0: (0, 0), 2: (0, 14), 1: (0, 17), 3: (1, 0)}
    for at, (features, hidden) in enumerate(alone(family, examples)):
        row, start = starts[at]
        here = slice(start, start + len(examples[at].input_ids))
        torch.testing.assert_close(batch.features[row, here], features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.last_hidden[row, here], hidden, rtol=1e-4, atol=1e-4)


def test_a_store_lays_out_rows_as_the_target_reads_them(llama: Family, tmp_path) -> None:
    examples = talk(14, 9, 3, 21)
    llama.target.tap((1, 2))
    store = open_store(str(tmp_path), llama.target, examples)
    store.fill(llama.target, examples)
    for reader in (Live(llama.target), store):
        source = Source(examples, reader, size=2, seed=0, room=24)
        assert source.lengths == [24, 23]
        batch = source.features([0, 1])
        if reader is not store:
            theirs = batch
    real = theirs.document >= 0
    for name, ours in vars(batch).items():
        both = ours, getattr(theirs, name)
        ours, other = (part[real] for part in both) if name in ("features", "last_hidden") else both
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
