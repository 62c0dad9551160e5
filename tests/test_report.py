"""The report: its lines, what it says of differences, how it is written, read, shown, and recomputed by a script that knows nothing of it."""

import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import Family
from decode.engine import PHASES, Generation, Run, Step, generate
from decode.figures import Sample
from decode.hindsight import Divergence, authors, divergences, overlap_by_depth, pieces
from decode.journal import trace_lines, write_trace
from decode.report import Report, write_report
from decode.words import marked
from models.drafter import Budget, Drafter, FeatureBatch, Loss, Plain
from models.sampling import Sampling
from models.source import byte_tokenizer
from reference import Guesser, plain_greedy
from runs import ROOT
from samples import COST, CUT, SAMPLES, drafted, plain

SETTINGS = {
    "drafter": "d",
    "target": "t",
    "dtype": "float32",
    "compiled": False,
    "tokens": 7,
    "nodes": 6,
    "temperature": 0.0,
}
SETTINGS |= {"threads": 1, "accept": "lossless"}


def report_of(samples: list[Sample], **changes: object) -> Report:
    return Report.of(samples, {**SETTINGS, **changes}, COST)


def test_a_report_has_a_line_for_each_set_and_one_for_all():
    report = report_of(SAMPLES[:3])
    assert [line.bench for line in report.lines] == ["a", "b", "all"]
    a, b, pooled = report.lines
    assert [line.prompts for line in report.lines] == [2, 2, 4]
    assert [line.rounds for line in report.lines] == [5, 4, 9]
    assert [line.tokens for line in report.lines] == [12, 7, 19]
    assert (a.tau.value, b.tau.value, pooled.tau.value) == (12 / 5, 7 / 4, 19 / 9)
    assert pooled.plain_tokens_per_second == pytest.approx(19 / 12.0)
    assert pooled.tokens_per_second == pytest.approx(19 / 7.0)
    assert [line.equal for line in report.lines] == [2, 2, 4]
    assert tuple(report.round_ms) == PHASES
    assert report.plain_round_ms == pytest.approx(12000 / 19)
    assert report.draft_acceptance_rate == (4 + 5 + 4) / (9 * 5)
    assert [line.bench for line in report_of(SAMPLES[:2]).lines] == ["a"]


def test_outputs_that_differ_are_not_equal():
    other = Sample("a", drafted([CUT], 2.0), plain([7], 3.0))
    other.drafted.generations[0].tokens[-1] += 1
    assert [line.equal for line in report_of([SAMPLES[1], other]).lines] == [1]


def test_texts_that_all_end_at_once_measure_nothing():
    with pytest.raises(ValueError, match="every text ended with its first token, so nothing was measured; choose"):
        report_of(SAMPLES[3:])


# ---- written and read


def test_a_report_is_read_back_as_it_was(tmp_path):
    report = report_of([SAMPLES[0], replace(SAMPLES[3], bench="c")])  # c has no figures: it had no rounds
    write_report(report, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["lines"][1]["tau"] == {"value": None, "low": None, "high": None}
    found = Report.read(tmp_path / "report.json")
    assert math.isnan(found.lines[1].tau.value)
    assert found.to_json() == report.to_json() == json.loads(text)
    assert replace(found, lines=[]) == replace(report, lines=[])
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, "there is no report .*; decode/run.py writes one"),
        ("{", "is no report: it is no JSON; measure again"),
        ('{"version": 1, "lines": []}', "is a report of version 1 and this is version 3; measure again"),
        ("[]", "is a report of version None"),
    ],
)
def test_another_report_is_refused_in_one_sentence(tmp_path, written, sentence):
    file = tmp_path / "report.json"
    if written is not None:
        file.write_text(written)
    with pytest.raises(ValueError, match=sentence) as refusal:
        Report.read(file)
    assert "\n" not in str(refusal.value)


# ---- shown


def shown(report: Report, **how: bool) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(console, **how)
    return console.export_text()


def test_the_table_has_the_figures_and_keeps_to_80_columns():
    report = report_of(SAMPLES[:3])
    text = shown(report)
    pooled = report.lines[-1]
    for told in (str(pooled.tau), str(pooled.speedup), "4/4", "tried", "joint", "by costs", "28.9%, 13 of 45"):
        assert told in text
    for one in report.predictions:
        assert f"{one.speedup:.2f} ({one.speedup_error:+.0%})" in text
    assert "lossy" not in text
    assert "A round yields" not in text
    assert all(sentence in re.sub(r"\s+", " ", shown(report, explained=True)) for sentence in report.explanation)


def test_differences_are_shown_with_the_largest_gap():
    apart = [Divergence("a", 0, 3, 5, 6, 0.125), Divergence("a", 1, 0, 5, 6, 0.03125)]
    report = Report.of(SAMPLES[:2], SETTINGS, COST, divergences=apart)
    assert "outputs that differ  2, top two logits at most 0.125 apart" in shown(report)
    assert "differ" not in shown(report_of(SAMPLES[:2]))


def test_a_lossy_tau_is_called_so_wherever_it_stands():
    report = report_of(SAMPLES[:3], accept="typical")
    text = shown(report)
    assert [line.split()[0] for line in text.splitlines() if "tau" in line and "lossy tau" not in line] == []
    assert text.count("lossy tau") == 2
    assert list(marked({"d": report.to_json()})) == ["d (lossy)"]


# ---- recomputed


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_script_recomputes_the_report_from_the_raw_log(
    llama: Family, tmp_path: Path, rows: int, temperature: float
) -> None:
    prompts = [[number, 40, number + 7, 3][: 2 + number % 3] for number in range(1, 8)]
    known = Guesser({tuple(prompt): llama.says(prompt, 14) for prompt in prompts})
    sampling = Sampling(temperature)
    samples = []
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        ours = generate(llama.target, known, batch, 14, Budget(nodes=8), sampling, rows)
        alone = generate(llama.target, Plain(), batch, 14, Budget(nodes=1), sampling, rows)
        samples.append(Sample("x", ours, alone, batch, start))
    report = report_of(samples)
    write_trace(tmp_path / "trace.jsonl", {"d": samples})
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]
    recompute = runpy.run_path(str(ROOT / "scripts" / "recompute.py"))["recompute"]
    found = recompute(tmp_path / "trace.jsonl")
    (line,) = report.lines
    assert list(found) == ["d"]
    assert found["d"] == {
        "tokens": line.tokens,
        "tau": pytest.approx(line.tau.value),
        "alpha": pytest.approx([depth.alpha for depth in report.depths]),
        **report.counters,
        "tokens_per_second": pytest.approx(line.tokens_per_second),
        "plain_tokens_per_second": pytest.approx(line.plain_tokens_per_second),
        "speedup": pytest.approx(line.speedup.value),
    }
    assert temperature or line.tau.value > 1.5


def test_the_raw_log_holds_every_token_in_its_round(llama: Family) -> None:
    prompts = [[9, 8], [7, 6, 5], [4]]
    known = Guesser({tuple(prompt): llama.says(prompt, 9) for prompt in prompts})
    run = generate(llama.target, known, prompts, 9, Budget(nodes=8), rows=2)
    head, *rounds = trace_lines("d", 0, Sample("x", run, run, prompts, 10), run)
    assert head["first"] == {10 + one.prompt: one.tokens[0] for one in run.generations}
    for one in run.generations:
        mine = [line for line in rounds if line["prompt"] == 10 + one.prompt]
        assert [head["first"][10 + one.prompt], *(token for line in mine for token in line["tokens"])] == one.tokens
        assert [line["round"] for line in mine] == sorted({line["round"] for line in mine})
    assert sorted({line["round"] for line in rounds}) == list(range(run.rounds))


# ---- in hindsight


def test_a_difference_is_told_with_the_gap_of_the_targets_top_two_logits(llama: Family) -> None:
    prompt = [5, 6, 7]
    said = llama.says(prompt, 8)
    run = Run([Generation(0, said), Generation(1, said)], [])
    wrong = Run([Generation(0, said), Generation(1, [*said[:3], said[3] + 1, *said[4:]])], [])
    (found,) = divergences(llama.target, [Sample("x", wrong, run, [prompt, prompt], 4)])
    with torch.inference_mode():
        logits = llama.stock(input_ids=torch.tensor([prompt + said[:3]]), use_cache=False).logits[0, -1]
    first, second = logits.sort(descending=True).values[:2].tolist()
    assert (found.bench, found.prompt, found.at) == ("x", 5, 3)
    assert (found.ours, found.plain) == (said[3] + 1, said[3])
    assert found.gap == pytest.approx(first - second, abs=1e-4)


class Uniform(Drafter):
    """Guesses every token alike at two depths, which the written text after the second token supervises."""

    def training_loss(self, batch: FeatureBatch) -> Loss:
        """What `Teacher` would compute, from the mask alone."""
        seen = torch.stack([batch.loss_mask.sum(), batch.loss_mask[:, 2:].sum(), torch.tensor(0)]).float()
        return Loss(seen.new_zeros(()), seen[0], seen, seen, seen * 0.25)


def test_overlap_is_the_mean_over_what_was_written(llama: Family) -> None:
    prompts = [[5, 6, 7], [8], [9, 10], [1], [2], [3]]
    run = Run(
        [Generation(number, plain_greedy(llama.stock, ids, 4, frozenset())) for number, ids in enumerate(prompts)], []
    )
    samples = [Sample("x", run, run, prompts)]
    assert overlap_by_depth(llama.target, Uniform(), samples) == [0.25, 0.25]
    assert overlap_by_depth(llama.target, Plain(), samples) == []


def test_authors_are_the_target_and_the_depth_of_a_guess():
    steps = [Step(5, (1, 3), 3, 3), Step(5, (), 1, 1), Step(5, (2, 4), 2, 2)]
    assert authors(Generation(0, list(range(7)), False, steps)) == [0, 1, 2, 0, 0, 1, 2]


def test_pieces_join_to_the_text_even_where_tokens_split_letters():
    tokenizer = byte_tokenizer()
    text = "né — 日本 🙂!"
    tokens = tokenizer.encode(text)
    told = pieces(tokenizer, tokens)
    assert "".join(told) == text
    assert len(told) == len(tokens)
    assert told[1:3] == ["", "é"]
    assert "".join(pieces(tokenizer, tokens[:2])) == tokenizer.decode(tokens[:2])
