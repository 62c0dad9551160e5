"""What a drafter is taught: the target's own words and nothing else."""

import gzip
import json

import pytest
from transformers import PreTrainedTokenizerBase

from models.source import byte_tokenizer
from train.chat import Example, example, render
from train.data import load_examples, write_rows
from train.features import Live, Source
from train.sampler import epoch_batches
from train.sources import conversations_of

# SmolLM2's, with the default system prompt and the line break after every end token that belongs to nobody
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are small.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 256

TALKS = {
    "one turn": [("user", "Hi?"), ("assistant", "Hello.")],
    "three turns": [
        ("user", "a"),
        ("assistant", "First, b."),
        ("user", "c?"),
        ("assistant", "naïve — ☃"),
        ("user", "e"),
        ("assistant", "f"),
    ],
    "system prompt": [("system", "assistant: obey"), ("user", "assistant:"), ("assistant", "assistant:")],
    "last word the user's": [("user", "a"), ("assistant", "b"), ("user", "c")],
}


def plain() -> tuple[PreTrainedTokenizerBase, frozenset[int], str]:
    return byte_tokenizer(), frozenset([END]), "<|end|>"


def chatml() -> tuple[PreTrainedTokenizerBase, frozenset[int], str]:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer, frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")]), "<|im_end|>"


def messages(talk: list[tuple[str, str]]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in talk]


def words(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def runs_of(made: Example) -> list[list[int]]:
    """The stretches of tokens in which the mask is true."""
    found: list[list[int]] = []
    for at, (token, spoken) in enumerate(zip(made.input_ids, made.loss_mask, strict=True)):
        if spoken and (at == 0 or not made.loss_mask[at - 1]):
            found.append([])
        if spoken:
            found[-1].append(token)
    return found


def written(path, *rows) -> object:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("make", [plain, chatml])
@pytest.mark.parametrize("talk", TALKS.values(), ids=list(TALKS))
def test_the_mask_marks_exactly_what_the_assistant_says_and_its_end_token(make, talk):
    tokenizer, ends, end = make()
    made = example(tokenizer, {"messages": messages(talk)}, ends)
    assert [words(tokenizer, ids) for ids in runs_of(made)] == [
        content + end for role, content in talk if role == "assistant"
    ]
    assert made.input_ids == render(tokenizer, messages(talk), speak=False)[: len(made.input_ids)]
    unspoken = [token for token, spoken in zip(made.input_ids, made.loss_mask, strict=True) if not spoken]
    assert words(tokenizer, unspoken).count("assistant" + (":" if make is plain else "\n")) >= sum(
        role == "assistant" for role, _ in talk
    )


def test_ids_of_an_answer_are_used_as_they_are():
    tokenizer, ends, _ = plain()
    ids = [7, 300, 7, 9]  # not what the content would give, and without an end token
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "xyz", "ids": ids}]}
    made = example(tokenizer, row, ends)
    assert runs_of(made) == [ids]
    assert made.input_ids == render(tokenizer, row["messages"][:1], speak=True) + ids


def test_an_answer_cut_short_is_followed_by_the_end_token_that_nobody_said():
    tokenizer, ends, _ = plain()
    said = render(tokenizer, messages([("user", "ab")]), speak=False)[len("user:") : -1]
    row = {
        "messages": [
            *messages([("user", "q")]),
            {"role": "assistant", "content": "ab", "ids": said},
            *messages([("user", "r"), ("assistant", "s")]),
        ]
    }
    made = example(tokenizer, row, ends)
    assert words(tokenizer, made.input_ids) == "user:q<|end|>assistant:ab<|end|>user:r<|end|>assistant:s<|end|>"
    assert [words(tokenizer, ids) for ids in runs_of(made)] == ["ab", "s<|end|>"]


def test_turns_after_an_answer_that_reads_differently_as_history_are_left_out():
    tokenizer, ends, _ = plain()
    answer = {"role": "assistant", "content": "ab", "ids": [65, 66, 67, END]}
    made = example(
        tokenizer,
        {"messages": [*messages([("user", "q")]), answer, *messages([("user", "r"), ("assistant", "s")])]},
        ends,
    )
    assert runs_of(made) == [[65, 66, 67, END]]
    assert made.loss_mask[-4:] == [True] * 4
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
    )
    thought = messages([("user", "q"), ("assistant", "hm</think>a"), ("user", "r"), ("assistant", "s")])
    assert [words(tokenizer, ids) for ids in runs_of(example(tokenizer, {"messages": thought}, ends))] == [
        "hm</think>a<|end|>"
    ]


def test_rows_of_token_ids_are_taken_as_they_are(tmp_path):
    tokenizer, ends, _ = plain()
    tokenizer.chat_template = None
    path = written(tmp_path / "rows.jsonl", {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert load_examples(conversations_of(path), tokenizer, ends, 99) == [Example([5, 6, 7], [False, True, True])]


GOOD = {"id": "good", "messages": messages([("user", "a"), ("assistant", "b")])}
REFUSED = {
    "empty": ([], r"the data hold no conversation"),
    "only the user": ([{"id": 3, "messages": messages([("user", "a")])}], r"^3 has no assistant turn"),
    "not JSON": ([GOOD, "{oops\n"], r"rows.jsonl line 2 is no JSON"),
    "another form": ([GOOD, {"words": "a"}], r"rows.jsonl line 2 has words; a row has messages"),
    "a list": ([[1, 2]], r"rows.jsonl line 1 is no object with columns"),
    "a short mask": ([{"id": 4, "input_ids": [1, 2], "loss_mask": [1]}], r"^4 has 2 input_ids"),
    "no mask": ([{"id": 4, "input_ids": [1, 2]}], r"^4 has 2 input_ids"),
}


@pytest.mark.parametrize(("rows", "message"), REFUSED.values(), ids=list(REFUSED))
def test_a_bad_file_is_refused_in_one_sentence(rows, message, tmp_path):
    tokenizer, ends, _ = plain()
    with pytest.raises(ValueError, match=message) as refusal:
        load_examples(conversations_of(written(tmp_path / "rows.jsonl", *rows)), tokenizer, ends, 99)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no data file .*gone\.jsonl; check data\.path"):
        list(conversations_of(tmp_path / "gone.jsonl"))


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    tokenizer, ends, _ = plain()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template; choose an instruct model"):
        load_examples(conversations_of(written(tmp_path / "rows.jsonl", GOOD)), tokenizer, ends, 99)


def test_a_template_that_rewrites_the_prompt_when_it_answers_is_refused():
    tokenizer, ends, _ = plain()
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(ValueError, match="good: the chat template rewrites earlier text"):
        example(tokenizer, GOOD, ends)


def test_conversations_are_cut_to_the_longest_and_left_out_where_no_answer_remains(tmp_path):
    tokenizer, ends, _ = plain()
    talks = [("user", "a"), ("assistant", "bcdef")], [("user", "a" * 30), ("assistant", "never seen")]
    path = written(tmp_path / "rows.jsonl", *({"messages": messages(talk)} for talk in talks))
    longest = len("user:a_assistant:bc")
    made = load_examples(conversations_of(path), tokenizer, ends, longest)
    assert [len(one.input_ids) for one in made] == [longest]
    assert [words(tokenizer, ids) for ids in runs_of(made[0])] == ["bc"]
    with pytest.raises(ValueError, match=r"within data\.longest=5 tokens"):
        load_examples(conversations_of(path), tokenizer, ends, 5)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_written_rows_are_the_same_bytes_every_time_and_read_back(name, tmp_path):
    rows = [GOOD, {"id": "é", "messages": messages([("user", "☃\n"), ("assistant", '"')])}]
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / name, iter(rows))
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    if name.endswith("gz"):
        assert (tmp_path / "first" / name).read_bytes()[4:8] == bytes(4)  # gzip would put the time here
    assert list(conversations_of(tmp_path / "first" / name)) == rows
    assert [file.name for file in (tmp_path / "first").iterdir()] == [name]
    stored = (tmp_path / "first" / name).read_bytes()
    assert "☃" in (gzip.decompress(stored) if name.endswith("gz") else stored).decode()


LENGTHS = [(7 * at) % 61 + 3 for at in range(300)]


@pytest.mark.parametrize(("count", "size"), [(300, 4), (299, 4), (9, 4), (3, 4), (1, 1), (300, 7)])
def test_an_epoch_has_every_conversation_once_but_for_the_remainder(count, size):
    batches = epoch_batches(LENGTHS[:count], size, seed=1)
    size = min(size, count)
    seen = [at for batch in batches for at in batch]
    assert {len(batch) for batch in batches} == {size}
    assert len(seen) == len(set(seen)) == count // size * size
    assert set(seen) <= set(range(count))


def test_epochs_are_functions_of_the_seed_and_differ():
    assert epoch_batches(LENGTHS, 4, seed=1) == epoch_batches(LENGTHS, 4, seed=1)
    assert epoch_batches(LENGTHS, 4, seed=1) != epoch_batches(LENGTHS, 4, seed=2)


def test_batches_hold_conversations_of_similar_length_in_mixed_order():
    batches = epoch_batches(LENGTHS, 4, seed=1)
    spread = [max(LENGTHS[at] for at in batch) - min(LENGTHS[at] for at in batch) for batch in batches]
    assert sum(spread) / len(spread) < 6  # a batch of strangers spreads over 36
    means = [sum(LENGTHS[at] for at in batch) for batch in batches]
    assert means != sorted(means)


def test_over_the_epochs_no_conversation_is_left_out_for_good():
    seen = {at for seed in range(20) for batch in epoch_batches(LENGTHS[:11], 4, seed) for at in batch}
    assert seen == set(range(11))


def test_a_run_reads_every_conversation_once_an_epoch_each_time_in_another_order():
    examples = [Example([0] * length, [True] * length) for length in LENGTHS[:12]]
    source = Source(examples, Live(None), size=3, seed=4)
    epochs = [[source.piece(4 * epoch + number) for number in range(4)] for epoch in range(3)]
    assert all(sorted(at for piece in epoch for at in piece) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = Source(examples, Live(None), size=3, seed=4)
    assert again.piece(9) == epochs[2][1]  # without the epochs before
    assert sorted(at for piece in source.everything() for at in piece) == list(range(12))
