"""The loop: whatever a drafter proposes and whoever sits beside it, a row's text is the target's own."""

import random
from dataclasses import asdict

import pytest

from conftest import Family
from decode.accept import accept
from decode.engine import PHASES, Generation, Run, Seats, generate, rounds
from models.cache import KVCache
from models.drafter import Budget, Drafter, Plain, Reading
from models.sampling import GREEDY, Sampling
from models.tree import TokenTree
from reference import Garbage, Guesser, plain_greedy, rounds_by_reading

CHANCE = random.Random(3)  # none of these prompts is answered with an end token
PROMPTS = [[CHANCE.randrange(256) for _ in range(length)] for length in (9, 3, 14, 1, 6, 11, 4)]
LIMIT = 12
NODES = 8
BUDGET = Budget(nodes=NODES)


def guesser(llama: Family, limit: int = LIMIT) -> Guesser:
    """A drafter that often knows what the target says after the prompts."""
    return Guesser({tuple(prompt): llama.says(prompt, limit) for prompt in PROMPTS}, NODES)


def texts(run: Run) -> list[list[int]]:
    """What was written, prompt by prompt."""
    assert [generation.prompt for generation in run.generations] == list(range(len(run.generations)))
    return [generation.tokens for generation in run.generations]


@pytest.fixture
def end_token(llama: Family, monkeypatch: pytest.MonkeyPatch) -> int:
    """The target ends a turn with a token that stands in the middle of some of its texts."""
    spoken = [plain_greedy(llama.stock, prompt, LIMIT, frozenset()) for prompt in PROMPTS]
    token = max(
        {token for text in spoken for token in text}, key=lambda token: (sum(token in text for text in spoken), token)
    )
    monkeypatch.setattr(llama.target.model.generation_config, "eos_token_id", token)
    monkeypatch.setattr(llama, "said", {})
    return token


@pytest.mark.exact
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("parents", [[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 0, 2, 5, 1]], ids=["chain", "tree"])
def test_a_drafter_of_garbage_gives_the_targets_own_text(llama: Family, parents: list[int], rows: int) -> None:
    run = generate(llama.target, Garbage(parents), PROMPTS, LIMIT, BUDGET, rows=rows)
    assert texts(run) == [llama.says(prompt, LIMIT) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", ["guesser", "plain"])
def test_seven_prompts_in_three_rows_equal_each_alone(llama: Family, drafter: str) -> None:
    limit = LIMIT if drafter == "guesser" else 8

    def drafting() -> Drafter:
        return guesser(llama) if drafter == "guesser" else Plain()

    together = generate(llama.target, drafting(), PROMPTS, limit, BUDGET, rows=3)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(llama.target, drafting(), [prompt], limit, BUDGET).generations[0]
        assert asdict(together.generations[number]) == asdict(alone) | {"prompt": number}
        assert alone.tokens == plain_greedy(llama.stock, prompt, limit, llama.target.end_tokens)


@pytest.fixture
def heights(llama: Family, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass over trees has read."""
    seen: list[int] = []
    read = llama.target.read

    def counted(tree: TokenTree, cache: KVCache, known: int = 0) -> Reading:
        seen.append(len(tree.tokens))
        return read(tree, cache, known)

    monkeypatch.setattr(llama.target, "read", counted)
    return seen


def test_rows_that_nobody_takes_are_dropped(llama: Family, end_token: int, heights: list[int]) -> None:
    """The target reads fewer rows as texts end, here and there, and every text stays what it is alone."""
    prompts = [*PROMPTS, *(prompt[::-1] for prompt in PROMPTS)]
    run = generate(llama.target, Plain(), prompts, LIMIT, Budget(), rows=10)
    assert texts(run) == [llama.says(prompt, LIMIT) for prompt in prompts]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == 10
    assert heights[-1] <= 5


def test_a_row_that_is_left_draws_on(llama: Family, heights: list[int]) -> None:
    """Six end together and the seventh sits down alone."""
    warm = Sampling(1.0, seed=1)
    run = generate(llama.target, Plain(), PROMPTS, LIMIT, Budget(), warm, rows=6)
    assert heights == [6] * (LIMIT - 1) + [1] * (LIMIT - 1)
    assert texts(run) == texts(generate(llama.target, Plain(), PROMPTS, LIMIT, Budget(), warm, rows=7))


def test_prompts_are_read_together_where_there_are_many_rows(
    llama: Family, end_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    tell = llama.target.prefill
    monkeypatch.setattr(llama.target, "prefill", lambda ids, *rest: sizes.append(len(ids)) or tell(ids, *rest))
    run = generate(llama.target, Plain(), PROMPTS * 9, LIMIT, Budget(), rows=48)
    assert sum(sizes) == len(PROMPTS) * 9
    assert min(sizes[:-1]) >= 48 // 16
    assert texts(run) == [llama.says(prompt, LIMIT) for prompt in PROMPTS] * 9


def test_plain_decoding_commits_one_token_a_round(llama: Family) -> None:
    run = generate(llama.target, Plain(), PROMPTS, LIMIT, Budget(), rows=2)
    for generation in run.generations:
        assert generation.committed == [1] * (len(generation.tokens) - 1)
        assert set(generation.accepted) == set(generation.offered) == {0}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("limit", [LIMIT, 3])
def test_the_books_of_every_round_equal_reading_the_text(llama: Family, limit: int, rows: int) -> None:
    drafter = guesser(llama)
    run = generate(llama.target, drafter, PROMPTS, limit, BUDGET, rows=rows)
    for generation in run.generations:
        proposals = drafter.proposed[tuple(PROMPTS[generation.prompt])][: len(generation.committed)]
        assert (generation.accepted, generation.offered, generation.committed) == rounds_by_reading(
            generation.tokens, proposals
        )
        assert 1 + sum(generation.committed) == len(generation.tokens)
    assert max(max(generation.accepted) for generation in run.generations) >= 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("limit", [LIMIT, 3])
def test_the_accepted_nodes_spell_the_text(llama: Family, limit: int, rows: int) -> None:
    drafter = guesser(llama)
    run = generate(llama.target, drafter, PROMPTS, limit, BUDGET, rows=rows)
    for generation in run.generations:
        proposals = drafter.proposed[tuple(PROMPTS[generation.prompt])][: len(generation.steps)]
        at = 1
        for step, (tokens, parents, valid) in zip(generation.steps, proposals, strict=True):
            assert step.nodes == sum(valid) - 1
            assert [parents[node] for node in step.path] == [0, *step.path][: len(step.path)]
            assert [tokens[node] for node in step.path] == generation.tokens[at : at + len(step.path)]
            at += step.committed
    assert any(step.path != tuple(range(1, len(step.path) + 1)) for one in run.generations for step in one.steps)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_books_hold_where_an_end_token_cuts_an_accepted_path(llama: Family, end_token: int, rows: int) -> None:
    drafter = Guesser(
        {tuple(prompt): plain_greedy(llama.stock, prompt, LIMIT + 8, frozenset()) for prompt in PROMPTS},
        NODES,
        skill=1.0,
    )
    run = generate(llama.target, drafter, PROMPTS, LIMIT, BUDGET, rows=rows)
    for generation in run.generations:
        proposals = drafter.proposed[tuple(PROMPTS[generation.prompt])][: len(generation.committed)]
        assert (generation.accepted, generation.offered, generation.committed) == rounds_by_reading(
            generation.tokens, proposals
        )
    assert any(one.ended and one.committed and one.accepted[-1] == one.committed[-1] for one in run.generations)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_end_token_stops_its_row_and_nothing_after_it_is_kept(llama: Family, end_token: int, rows: int) -> None:
    run = generate(llama.target, guesser(llama), PROMPTS, LIMIT, BUDGET, rows=rows)
    assert texts(run) == [plain_greedy(llama.stock, prompt, LIMIT, llama.target.end_tokens) for prompt in PROMPTS]
    for generation in run.generations:
        assert end_token not in generation.tokens[:-1]
        assert generation.ended == (generation.tokens[-1] == end_token)
    assert {generation.ended for generation in run.generations} == {True, False}


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_limit_cuts_a_path_that_goes_beyond_it(llama: Family, limit: int) -> None:
    run = generate(llama.target, guesser(llama), PROMPTS, limit, BUDGET, rows=3)
    assert texts(run) == [llama.says(prompt, LIMIT)[:limit] for prompt in PROMPTS]
    assert not any(generation.ended for generation in run.generations)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_prompts_answered_by_an_end_token_alone_still_get_their_generation(
    llama: Family, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once ends the first prompt, one in the middle, or every one."""
    firsts = [llama.says(prompt, LIMIT)[0] for prompt in PROMPTS]
    for ends in ([firsts[0]], [firsts[0], firsts[4]], firsts):
        monkeypatch.setattr(llama.target.model.generation_config, "eos_token_id", ends)
        run = generate(llama.target, guesser(llama), PROMPTS, LIMIT, BUDGET, rows=rows)
        assert texts(run) == [plain_greedy(llama.stock, prompt, LIMIT, llama.target.end_tokens) for prompt in PROMPTS]
        short = [generation for generation in run.generations if firsts[generation.prompt] in ends]
        assert short
        assert all(asdict(one) == asdict(Generation(one.prompt, [firsts[one.prompt]], ended=True)) for one in short)
        assert run.rounds > 0 or ends == firsts


def test_no_prompts_give_no_generations(llama: Family) -> None:
    assert generate(llama.target, Plain(), [], LIMIT, Budget(), rows=3).generations == []


@pytest.mark.parametrize(
    ("prompts", "limit", "sentence"),
    [
        ([[5], []], LIMIT, "a prompt is empty; every prompt needs at least one token"),
        (
            [[5], [6] * 250],
            LIMIT,
            "a prompt of 250 tokens and 12 new ones exceed the 256 tokens of llama; shorten the prompt or ask for fewer",
        ),
        ([[5]], 0, "limit=0 leaves nothing to say; ask for at least one token"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(
    llama: Family, prompts: list[list[int]], limit: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        generate(llama.target, Plain(), prompts, limit, Budget())


def test_a_prompt_may_fill_the_context_to_the_last_token(llama: Family) -> None:
    prompt = PROMPTS[0] * 30
    run = generate(llama.target, Garbage([-1, 0, 1, 0, 3]), [prompt[:246]], 10, BUDGET)
    assert len(run.generations[0].tokens) == 10


@pytest.mark.exact
def test_a_seed_gives_a_row_its_text_whatever_sits_beside_it(llama: Family) -> None:
    def spoken(seed: int, rows: int, drafter: Drafter, prompts: list[list[int]] = PROMPTS[:4]) -> list[list[int]]:
        return texts(generate(llama.target, drafter, prompts, LIMIT, BUDGET, Sampling(1.0, seed=seed), rows=rows))

    for drafting in (lambda: guesser(llama), Plain):
        alone = spoken(7, 1, drafting())
        assert spoken(7, 3, drafting()) == alone
        assert spoken(7, 1, drafting(), PROMPTS[:2]) == alone[:2]
        assert spoken(8, 1, drafting()) != alone
    assert alone != [llama.says(prompt, LIMIT) for prompt in PROMPTS[:4]]


def test_the_cache_holds_every_token_but_the_last_and_nothing_in_free_rows(llama: Family) -> None:
    drafter = guesser(llama)
    seats = Seats(llama.target, PROMPTS, LIMIT, BUDGET, GREEDY, rows=3)
    state = drafter.begin(3, seats.cache.capacity)
    free = 0
    while seats.fill():
        tree = drafter.propose(seats.committed, state, BUDGET, seats.voice)
        reading = llama.target.read(tree, seats.cache)
        assert reading.logits is not None
        seats.keep(tree, reading, accept(tree, reading.logits, seats.voice))
        held = [0 if who is None else len(PROMPTS[who.prompt]) + len(who.tokens) - 1 for who in seats.sitting]
        assert seats.cache.lengths == held
        free += sum(who is None for who in seats.sitting) - len(seats.leave())
    assert free > 3  # rows that nobody wanted any more


def test_rounds_say_who_moved_who_finished_and_how_long_it_took(llama: Family) -> None:
    turns = list(rounds(llama.target, guesser(llama), PROMPTS, LIMIT, BUDGET, rows=3))
    assert sorted(generation.prompt for turn in turns for generation in turn.finished) == list(range(len(PROMPTS)))
    for turn in turns:
        assert tuple(turn.seconds) == PHASES
        assert all(seconds >= 0 for seconds in turn.seconds.values())
        assert 1 <= len(turn.moved) <= 3
        assert turn.width == NODES
    assert turns[0].prefill > turns[-1].prefill  # nobody waits any more
    run = generate(llama.target, guesser(llama), PROMPTS, LIMIT, BUDGET, rows=3)
    assert run.rounds == len(turns)
    assert run.seconds["verify"] == sum(turn.seconds["verify"] for turn in run.turns)
    assert run.seconds["verify"] > run.seconds["keep"] > 0
