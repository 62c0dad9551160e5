"""What a drafter would learn from, before anything trains: how much there is, how long, and who says what."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from conf.schema import Reasoning, Run
from decode.opening import end_tokens_of, open_tokenizer
from train.answers import conversations_for
from train.chat import Example, stretches
from train.data import load_examples, spoken

BAR = 40  # characters of the longest bar
SIZES = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)  # of a draft vocabulary


def show(run: Run) -> None:
    """The command: print counts, a histogram of lengths, and `run.show` conversations in which what teaches is coloured."""
    console, tokenizer = Console(), open_tokenizer(run.target)
    kept = run.data.reasoning is Reasoning.keep
    rows, ends = conversations_for(run), end_tokens_of(run.target, tokenizer)
    examples = load_examples(rows, tokenizer, ends, run.data.longest, kept)
    console.print(f"{run.data.path}, up to {run.data.longest} tokens a conversation")
    console.print(counted(examples))
    console.print(histogram([len(example.input_ids) for example in examples]))
    console.print(coverage(examples))
    for number in range(min(run.show, len(examples))):
        example = examples[number * len(examples) // run.show]
        console.rule(f"{len(example.input_ids)} tokens, {sum(example.loss_mask)} of them teach", align="left")
        console.print(coloured(tokenizer, example))


def counted(examples: Sequence[Example]) -> Table:
    """Conversations, answers and tokens."""
    answers = sum(len(list(stretches(example.loss_mask))) for example in examples)
    tokens = sum(len(example.input_ids) for example in examples)
    taught = sum(sum(example.loss_mask) for example in examples)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("conversations", "answers", "tokens", "that teach", "share"):
        table.add_column(heading, justify="right")
    table.add_row(f"{len(examples):,}", f"{answers:,}", f"{tokens:,}", f"{taught:,}", f"{taught / tokens:.0%}")
    return table


def histogram(lengths: Sequence[int]) -> Table:
    """How many conversations have up to 32, 64, 128, ... tokens."""
    bounds = [2**power for power in range(5, max(5, (max(lengths) - 1).bit_length()) + 1)]
    counts = [0] * len(bounds)
    for length in lengths:
        counts[bisect_left(bounds, length)] += 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens up to", justify="right")
    table.add_column("conversations", justify="right")
    table.add_column("")
    for bound, count in zip(bounds, counts, strict=True):
        table.add_row(f"{bound:,}", f"{count:,}", "█" * -(-BAR * count // max(counts)))
    return table


def coverage(examples: Sequence[Example]) -> Table:
    """Which share of what the target says a draft vocabulary of its commonest tokens can say, by size."""
    counts = torch.bincount(spoken(examples)[1]).sort(descending=True).values
    used = int((counts > 0).sum())
    sizes = [size for size in SIZES if size < used] + [used]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("draft vocabulary")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    table.add_row("covers", *(f"{counts[:size].sum() / counts.sum():.1%}" for size in sizes))
    return table


def coloured(tokenizer: PreTrainedTokenizerBase, example: Example) -> Text:
    """The conversation as the model reads it: dim what it is given, green what it says and what teaches."""
    text, ids = Text(), example.input_ids
    ends = [0, *(edge for stretch in stretches(example.loss_mask) for edge in stretch), len(ids)]
    for number, (start, end) in enumerate(pairwise(ends)):
        text.append(str(tokenizer.decode(ids[start:end])), style="green" if number % 2 else "dim")
    return text
