"""A small causal LM as drafter, against reading every branch afresh with transformers' own model."""

from pathlib import Path

import pytest
import torch

from conftest import Family, family_of, stock_model, tiny_config, tiny_target
from decode.engine import generate
from models.draft_model import DraftModel
from models.drafter import Budget, Committed
from models.sampling import Sampling, Voice
from models.source import byte_tokenizer, from_random
from models.target import Target
from models.tree import TokenTree, chain, ordered_paths
from reference import read_paths

PROMPTS = [[5, 9, 200, 31, 8], [17, 4], [99, 98, 97, 3, 4, 5, 6, 7, 8], [44]]
BUSH = Budget(tuple(ordered_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]])), nodes=8)


def small(architecture: str = "llama", **changes: object) -> Path:
    """Another model of the same vocabulary and tokenizer."""
    return from_random(tiny_config(architecture, num_hidden_layers=2, hidden_size=16, **changes))


def drafter(target: Target, folder: Path) -> DraftModel:
    return DraftModel(target.ends, str(folder)).eval()


def probs_after(stock, text: list[int], tree: TokenTree, row: int) -> torch.Tensor:
    """[N, V] what the small model says after every node, whose root ends `text`."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    return read_paths(stock, text[:-1], tokens, parents).softmax(-1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mistral"])
def test_trees_are_those_of_reading_every_branch_afresh(architecture: str) -> None:
    """In rows of unequal length that commit ragged paths, stand empty, and are seated again."""
    target, folder = family_of("llama").target, small(architecture)
    stock, made = stock_model(folder), drafter(target, folder)
    state, sampling = made.begin(3, 60), Sampling(1.0)
    texts: list[list[int]] = [[], [], []]
    turns = [
        [([5, 9, 200, 31, 8], True, 1), ([17, 4], True, 2), ([99, 98, 97, 3, 4, 5, 6, 7, 8], True, 3)],
        [([1, 20, 21], False, 22), ([2], False, 23), ([3, 24], False, 25)],
        [([22], False, 26), ([], False, 0), ([25, 27, 28, 29], False, 30)],
        [([26, 31], False, 32), ([40, 41, 42, 43, 44, 45, 46], True, 47), ([], False, 0)],
        [([32], False, 33), ([47, 48], False, 49), ([50], True, 51)],
    ]
    for turn in turns:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(new) for new, *_ in turn], batch_first=True).long()
        blank = torch.empty(3, tokens.shape[1], 0)
        length, bonus = torch.tensor([len(new) for new, *_ in turn]), torch.tensor([said for *_, said in turn])
        said = Committed(tokens, length, blank, blank, bonus, torch.tensor([fresh for _, fresh, _ in turn]))
        kept = length.clone()
        voice = Voice(sampling, [sampling.draw(row) for row in range(3)])
        tree = made.propose(said, state, Budget(BUSH.paths, 8, sampled=True), voice)
        assert length.equal(kept)
        assert tree.child_probs is not None
        for row, (new, fresh, after) in enumerate(turn):
            texts[row] = new if fresh else texts[row] + new
            if not new:
                continue
            expected = probs_after(stock, [*texts[row], after], tree, row)
            inner = sorted(set(tree.parents[row].tolist()) - {-1})
            ours = tree.child_probs[row, inner]
            torch.testing.assert_close(ours, expected[inner], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_first_layers_of_a_target_say_what_a_target_of_those_layers_says(family: Family, layers: int) -> None:
    shallow, ids = family.target.shallow(layers), torch.tensor([PROMPTS[2]])
    own = stock_model(Path(family.stock.name_or_path))
    body = own.model
    body.layers = body.layers[:layers]
    reading = shallow.prefill(ids, torch.tensor([9]), shallow.cache(1, 20))
    torch.testing.assert_close(reading.logits[0, 0], own(ids, use_cache=False).logits[0, -1], rtol=1e-3, atol=1e-3)
    assert len(family.target.layers) == 3
    shared = {weight.data_ptr() for weight in family.target.model.state_dict().values()}
    assert {weight.data_ptr() for weight in shallow.body.state_dict().values()} <= shared


def test_nodes_that_were_read_before_need_not_be_read_again(family: Family) -> None:
    target = family.target
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in PROMPTS], batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6, 5]] * 4)
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))
    tree = TokenTree(tokens, parents, torch.ones(4, 9, dtype=torch.bool))
    caches = [target.cache(4, 40) for _ in range(2)]
    for cache in caches:
        target.prefill(ids, lengths, cache)
    whole = target.read(tree, caches[0]).logits
    assert whole is not None
    known = 0
    for upto in (1, 3, 6, 9):
        part = TokenTree(tokens[:, :upto], parents[:, :upto], tree.valid[:, :upto])
        logits = target.read(part, caches[1], known).logits
        torch.testing.assert_close(logits, whole[:, known:upto], rtol=1e-3, atol=1e-3)
        known = upto
    path = [0, 1, 3, 6]
    following = TokenTree.chains(tokens[:, :2])
    for cache in caches:  # and what is kept of them is the same
        cache.keep([path[:count] for count in (4, 2, 3, 1)])
    first, second = (target.read(following, cache).logits for cache in caches)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)


def test_a_draft_model_reads_every_token_of_a_round_once(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = drafter(llama.target, small()), []
    run = made.model._run
    monkeypatch.setattr(made.model, "_run", lambda **how: (read.append(how["input_ids"].shape[1]), run(**how))[1])
    generate(llama.target, made, PROMPTS[:1], 2, Budget(depth=3, branch=4, nodes=10))
    assert read == [5, 1, 4, 4]  # the prompt, the bonus token, and the nodes that grow


@pytest.mark.exact
@pytest.mark.parametrize("budget", [Budget(), BUSH, Budget(tuple(chain(3)), 4)], ids=["dynamic", "bush", "chain"])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_the_targets_own_with_any_draft_model(llama: Family, budget: Budget, rows: int) -> None:
    for made in (drafter(llama.target, small()), DraftModel(llama.target.ends, layers=2)):
        run = generate(llama.target, made, PROMPTS, 12, budget, rows=rows)
        assert [one.tokens for one in run.generations] == [llama.says(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_target_as_its_own_draft_model_is_always_accepted(llama: Family, rows: int) -> None:
    twin = drafter(llama.target, from_random(tiny_config("llama")))
    run = generate(llama.target, twin, PROMPTS, 13, Budget(tuple(chain(3)), 4), rows=rows)
    assert [one.tokens for one in run.generations] == [llama.says(prompt, 13) for prompt in PROMPTS]
    assert [one.accepted for one in run.generations] == [[3, 3, 3]] * 4
    sampling = Sampling(0.9, top_k=9, seed=1)
    drawn = generate(llama.target, twin, PROMPTS, 13, Budget(tuple(chain(3)), 4, sampled=True), sampling, rows)
    assert [one.accepted for one in drawn.generations] == [[3, 3, 3]] * 4


def test_what_a_row_accepts_does_not_depend_on_its_neighbours() -> None:
    target = tiny_target("llama", initializer_range=0.1)  # whose first layer sometimes knows
    made, budget = DraftModel(target.ends, layers=2), Budget(nodes=12, depth=3, branch=3)
    alone = generate(target, made, PROMPTS, 15, budget).generations
    assert len({tuple(one.accepted) for one in alone}) > 2
    together = generate(target, made, PROMPTS, 15, budget, rows=3).generations
    assert [one.accepted for one in together] == [one.accepted for one in alone]


def test_its_first_guess_is_graded_against_target_and_text(llama: Family) -> None:
    folder = small()
    stock, made = stock_model(folder), drafter(llama.target, folder)
    texts, spoken = [[*PROMPTS[2], 1, 2, 3], [*PROMPTS[0], 7]], [slice(6, 12), slice(2, 6)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, said in enumerate(spoken):
        mask[row, said] = True
    batch = llama.target.features(ids, mask, torch.tensor([12, 6]))
    loss = made.eval().training_loss(batch)
    seen, hits, shared = 0, 0, 0.0
    for text, said in zip(texts, spoken, strict=True):
        target_logits, draft_logits = (model(torch.tensor([text])).logits[0] for model in (llama.stock, stock))
        for at in range(said.start, said.stop - 1):  # what follows a token that the target said
            seen += 1
            hits += int(draft_logits[at].argmax()) == text[at + 1]
            shared += torch.minimum(target_logits[at].softmax(-1), draft_logits[at].softmax(-1)).sum().item()
    assert loss.seen.tolist() == made.counts(mask, batch.document).tolist() == [seen]
    assert loss.hits.tolist() == [hits]
    assert loss.overlap.item() == pytest.approx(shared, rel=1e-3)


@pytest.mark.parametrize("width", [300, 262])
def test_a_head_padded_otherwise_than_the_targets_is_cut_or_filled(llama: Family, width: int) -> None:
    made = drafter(llama.target, small(vocab_size=width))
    assert made.vocabulary.size == min(width, 272)
    run = generate(llama.target, made, PROMPTS, 8, Budget(tuple(chain(2)), 3))
    assert [one.tokens for one in run.generations] == [llama.says(prompt, 8) for prompt in PROMPTS]
    sampling = Sampling(1.0)
    generate(llama.target, made, PROMPTS, 8, Budget(tuple(chain(2)), 3, sampled=True), sampling)


def test_another_vocabulary_is_refused_before_weights_load(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("models.draft_model.load_target", None)
    with pytest.raises(
        ValueError,
        match=r"has another vocabulary than llama \('zebra' is 257 there and None here\); a draft model needs",
    ):
        DraftModel(llama.target.ends, str(tmp_path))


@pytest.mark.parametrize("layers", [0, 3, 99])
def test_layers_that_are_none_or_all_are_refused(llama: Family, layers: int) -> None:
    with pytest.raises(ValueError, match=f"layers={layers}: llama has 3 layers; take at least 1 and not all"):
        DraftModel(llama.target.ends, layers=layers)


def test_a_draft_model_that_is_nowhere_is_refused(llama: Family) -> None:
    with pytest.raises(ValueError, match="there is no draft model folder 'gone'"):
        DraftModel(llama.target.ends, "gone")
