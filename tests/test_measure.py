"""What a measurement says, against generations counted by hand."""

import json
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conf.schema import Decode
from decode.engine import Generation, Run, generate
from decode.measure import Arm, budget_for, measure, settings
from decode.opening import find_drafter, open_drafter, open_target
from decode.prompts import bench_prompts, conversations
from decode.report import Report, Sample, alpha_by_depth, bootstrap, looped, speedup, tau
from models.drafter import Budget, Plain
from models.shelf import Card, read_card
from models.tree import chain
from runs import changed, composed
from train import job
from train.data import write_rows
from train.regenerate import answer

EXACT = ("target.dtype=fp32", "optim.precision=fp32", "decode.tokens=21")


@dataclass
class Loop:
    """The whole way: the target answers the benchmark, a drafter learns the answers, and is measured on it."""

    out: Path
    report: Report


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    folder = tmp_path_factory.mktemp("measure")
    asked = [{"messages": [{"role": "user", "content": text}]} for (text,) in conversations("tiny") * 2]
    write_rows(folder / "prompts.jsonl", asked)
    run = composed(
        *EXACT, f"out={folder}/out", f"regenerate.prompts={folder}/prompts.jsonl", f"regenerate.out={folder}/said.jsonl",
        "regenerate.tokens=21", f"data.path={folder}/said.jsonl", "data.heldout=4", "data.features=memory",
        "optim.steps=80", "optim.lr=5e-3", "drafter.heads=2", "log.evaluate_every=1000", "log.save_every=1000",
    )  # fmt: skip
    answer(run)
    job.train(run)
    return Loop(folder / "out", measure(run))


def test_a_measurement_counts_what_was_generated(loop):
    target = open_target(composed(*EXACT).target)
    card = read_card(loop.out)
    drafter = open_drafter(loop.out, card, target)
    prompts = bench_prompts(["tiny"], target.tokenizer, 4, 400)["tiny"]
    drafted = generate(target, drafter, prompts, 21, Budget(tuple(map(tuple, card.tree)))).generations
    plain = generate(target, Plain(), prompts, 21, Budget(nodes=1)).generations
    (line,) = loop.report.lines
    assert (line.bench, line.prompts, line.equal) == ("tiny", 4, 4)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    passes = sum(len(one.committed) for one in drafted)
    assert line.rounds == passes
    assert line.tokens == sum(len(one.tokens) - 1 for one in plain)
    assert line.tau.value == pytest.approx(line.tokens / passes)
    assert line.tau.value > 1.5
    assert sum(loop.report.tried) == sum(sum(one.offered) for one in drafted)
    assert line.speedup.value == pytest.approx(line.tokens_per_second / line.plain_tokens_per_second)


def test_the_report_is_written_and_says_what_it_was_taken_with(loop):
    (folder,) = (loop.out / "measure").iterdir()
    assert [file.name for file in folder.iterdir()] == ["report.json"]
    written = json.loads((folder / "report.json").read_text())
    assert written == loop.report.to_json()
    assert written["version"] == 1
    taken = written["settings"]
    assert (taken["drafter"], taken["target"], taken["dtype"]) == ("tiny", "tiny", "float32")
    assert taken["tree"] == read_card(loop.out).tree
    assert taken["nodes"] == len(taken["tree"]) + 1 > 2
    assert (taken["tokens"], taken["temperature"], taken["rows"]) == (21, 0.0, 1)


def test_prompts_side_by_side_are_counted_one_by_one(loop, tmp_path):
    how = ["decode.rows=3", "decode.tree=chain", "decode.depth=2", f"decode.out={tmp_path}/here"]
    report = measure(composed(*EXACT, f"trained={loop.out}", *how))
    (line,) = report.lines
    assert (line.prompts, line.equal) == (4, 4)
    assert report.settings["tree"] == [[0], [0, 0]]
    assert line.tau.value > 1.5
    assert (tmp_path / "here" / "report.json").exists()


def test_a_drafter_of_another_target_is_refused_before_weights_load(loop, monkeypatch):
    monkeypatch.setattr("decode.measure.open_target", None)
    with pytest.raises(ValueError, match=r"was trained for tiny \(fingerprint"):
        measure(composed(*EXACT, f"trained={loop.out}", "target.random.initializer_range=0.1"))
    with pytest.raises(ValueError, match=r"was trained for tiny \(width 64\); tiny has width 32"):
        measure(composed(*EXACT, f"trained={loop.out}", "target.random.hidden_size=32"))


REFUSED = [
    ("bench", ["nope"], "there is no benchmark 'nope'; use gsm8k, humaneval, math_reasoning, mbpp, mt_bench, qa"),
    ("bench", [], "decode.bench is empty"),
    ("tree", "bush", "decode.tree=bush; use auto, chain, dynamic, or a list of paths such as [[0],"),
    ("tree", [], "decode.tree=[]; use auto"),
    ("tree", [0, 1], "decode.tree=[0, 1]; use auto"),
    ("tree", [[0], [1, 0]], "the tree lists [1, 0] without its parent [1]"),
    ("tree", [[0], [0]], "the tree lists [0] twice"),
    ("tree", [[0], [0, 0], [0, 0, 0]], "the tree is 3 deep and this drafter has 2 heads"),
    ("prompts", 0, "decode.prompts=0 measures nothing; give at least 1"),
    ("tokens", 1, "decode.tokens=1 measures nothing; give at least 2"),
    ("nodes", 1, "decode.nodes=1 measures nothing; give at least 2"),
    ("rows", 0, "decode.rows=0"),
    ("depth", 0, "decode.depth=0"),
    ("longest", 3, "no prompt of tiny is within decode.longest=3 tokens; raise it (the shortest has 28)"),
    ("turns", 0, "decode.turns=0 measures nothing; give at least 1"),
    ("turns", 2, "decode.turns=2, and the longest conversation chosen from tiny has 1; ask for fewer"),
    ("temperature", -1.0, "temperature=-1.0"),
    ("tokens", 9999, "exceed the 2048 tokens of tiny"),
]


TALKS = [["Hi.", "And then?", "Bye."], ["What is one?"], ["Name a colour.", "Another."], ["Up?", "Down?"]]


@pytest.mark.parametrize("rows", [1, 3])
def test_conversations_are_decoded_turn_by_turn_after_the_targets_own_answers(
    loop, tmp_path, rows, monkeypatch, capsys
):
    read: list[tuple[bool, list[int]]] = []

    def seen(target, drafter, prompts, *rest):
        read.extend((isinstance(drafter, Plain), prompt) for prompt in prompts)
        return generate(target, drafter, prompts, *rest)

    monkeypatch.setattr("decode.measure.generate", seen)
    path = tmp_path / "talks_of_several_turns.jsonl"
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in TALKS))
    told = ["decode.turns=2", f"decode.rows={rows}", f"decode.bench=[{path}]", f"decode.out={tmp_path}/here"]
    report = measure(composed(*EXACT, f"trained={loop.out}", *told))
    target = open_target(composed(*EXACT).target)
    wanted = []
    for turns in TALKS:
        text = ""
        for turn in turns[:2]:
            text += f"user:{turn}<|end|>"
            wanted.append(target.tokenizer.encode(f"{text}assistant:"))
            (said,) = generate(target, Plain(), [wanted[-1]], 21, Budget(nodes=1)).generations
            text += f"assistant:{target.tokenizer.decode(said.tokens, skip_special_tokens=True)}<|end|>"
    warm = read[:2]
    assert [prompt for _, prompt in warm] == [wanted[0]] * 2
    for plainly in (True, False):
        assert sorted(prompt for arm, prompt in read[2:] if arm is plainly) == sorted(wanted)
    (line,) = report.lines
    assert (line.bench, line.prompts, line.equal) == ("talks_of_several_turns", 7, 7)
    assert (report.settings["bench"], report.settings["turns"]) == ([str(path)], 2)
    printed = capsys.readouterr().out
    assert str(line.tau) in printed  # a long name leaves the figures whole
    assert str(line.speedup) in printed


@pytest.mark.parametrize(
    ("bench", "turns"), [("nope", 1), ("mine.jsonl", 1), ("hub:///nowhere", 1), ("rag", 1), ("qa", 2)]
)
def test_what_cannot_be_asked_is_refused_before_weights_load(loop, bench, turns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    monkeypatch.setattr("decode.measure.open_target", None)
    with pytest.raises(ValueError, match=bench):
        measure(composed(*EXACT, f"trained={loop.out}", f"decode.bench=['{bench}']", f"decode.turns={turns}"))


@pytest.mark.parametrize(
    ("setting", "value", "message"), REFUSED, ids=[f"{name}={value}" for name, value, _ in REFUSED]
)
def test_a_bad_setting_ends_in_one_sentence(loop, setting, value, message):
    run = composed(*EXACT)
    run.trained = str(loop.out)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        measure(changed(run, f"decode.{setting}", value))
    assert "\n" not in str(refusal.value)


def test_the_budget_is_what_decode_tree_names():
    card = Card("f", {}, {}, [], tree=[[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    assert budget_for(Decode(), card).paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert budget_for(Decode(nodes=4), card) == Budget(((0,), (1,), (0, 0)), 4, 4)
    assert budget_for(Decode(tree="chain", depth=3), card) == Budget(tuple(chain(3)), 10, 3)
    assert budget_for(Decode(tree=[[0, 0], [0]], nodes=2), card) == Budget(((0,), (0, 0)), 3, 4)


def test_the_settings_say_which_tree_was_measured(loop):
    run = composed(*EXACT)
    card = Card("", {}, {}, [])
    told = [
        settings(run, Arm("x", loop.out, card, budget), torch.float32)
        for budget in (Budget((), 7, 4, 3), Budget(tuple(chain(2)), 7, 4))
    ]
    assert [(one["nodes"], one["tree"]) for one in told] == [(7, {"depth": 4, "branch": 3}), (3, [[0], [0, 0]])]


def test_a_drafter_that_recommends_no_tree_grows_its_own():
    own, other = Card("", {}, {}, []), Card("", {}, {}, [], [[0], [1]])
    for card, tree in ((own, "auto"), (own, "dynamic"), (other, "dynamic")):
        assert budget_for(Decode(tree=tree, nodes=7, depth=3, branch=2), card) == Budget((), 7, 3, 2)


def test_drafters_side_by_side_are_measured_in_one_table(loop, tmp_path, capsys):
    measure(composed(*EXACT, f"trained={loop.out}", f"decode.beside=[{loop.out}]", f"decode.out={tmp_path}/here"))
    first, second = (json.loads((tmp_path / "here" / f"report{name}.json").read_text()) for name in ("", "_out"))
    assert first["settings"]["drafter"] == "tiny"
    assert second["settings"]["drafter"] == "out"
    for ours, theirs in zip(first["lines"], second["lines"], strict=True):
        same = ("tokens", "rounds", "tau", "equal", "plain_tokens_per_second")  # one plain arm for both
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    table = capsys.readouterr().out.split("equal")[-1]
    assert re.findall(r"^ *(plain|tiny|out) ", table, re.MULTILINE) == ["plain", "tiny", "out"]


@pytest.mark.parametrize("there", [[], ["shipped"], ["out"], ["out", "shipped"], ["named", "out", "shipped"]])
def test_a_named_drafter_goes_before_the_trained_and_that_before_the_shipped(tmp_path, there, monkeypatch):
    monkeypatch.setattr("decode.opening.packaged", lambda path: tmp_path / path.removeprefix("pkg://"))
    folders = {
        "named": tmp_path / "named",
        "out": tmp_path / "out",
        "shipped": tmp_path / "models" / "shipped" / "tiny",
    }
    for name in there:
        folders[name].mkdir(parents=True)
        (folders[name] / "drafter.yaml").write_text("")
    run = composed(f"out={folders['out']}", *([f"trained={folders['named']}"] if "named" in there else []))
    if there:
        assert find_drafter(run) == folders[there[0]]
    else:
        with pytest.raises(
            ValueError, match=r"no trained drafter in .*out; train one with `python -m train conf=tiny`, or name one"
        ):
            find_drafter(run)


def test_a_named_drafter_that_is_missing_is_not_replaced_by_another(loop):
    with pytest.raises(ValueError, match="there is no drafter folder 'gone'"):
        find_drafter(composed(f"out={loop.out}", "trained=gone"))


# ---- figures


def drafted(generations: list[list[tuple[int, int, int]]], seconds: float, prefill: float = 0.5) -> Run:
    """A run in which every round of every generation accepted, offered and committed so much."""
    made = []
    for prompt, turns in enumerate(generations):
        accepted, offered, committed = (list(values) for values in zip(*turns, strict=True)) if turns else ([], [], [])
        made.append(Generation(prompt, list(range(1 + sum(committed))), False, accepted, offered, committed))
    phases = {"draft": seconds / 8, "verify": seconds / 2, "accept": seconds / 8, "keep": seconds / 4}
    return Run(made, phases, prefill, sum(map(len, generations)))


def plain(tokens: list[int], seconds: float, prefill: float = 0.25) -> Run:
    return drafted([[(0, 0, 1)] * (count - 1) for count in tokens], seconds, prefill)


CUT = [(2, 3, 3), (0, 1, 1), (2, 2, 2)]  # the last round stands at the limit: its bonus token is beyond it
SHORT = [(4, 4, 5), (1, 1, 1)]  # the last round ends the text with a guess
SAMPLES = [
    Sample("a", drafted([CUT], 2.0), plain([7], 3.0)),
    Sample("a", drafted([SHORT], 1.0), plain([7], 4.0)),
    Sample("b", drafted([[(0, 2, 1)], CUT], 4.0), plain([2, 7], 5.0)),
    Sample("b", drafted([[]], 0.0), plain([1], 0.0)),  # its very first token ended the text
]


def test_tau_is_tokens_per_pass_whatever_was_cut():
    assert tau(SAMPLES[:1]) == 6 / 3
    assert tau(SAMPLES[1:2]) == 6 / 2
    assert tau(SAMPLES) == (6 + 6 + 1 + 6) / (3 + 2 + 1 + 3)
    assert tau([Sample("a", plain([7], 1.0), plain([7], 1.0))]) == 1.0


def test_speed_up_is_tokens_per_second_over_plain_decoding():
    assert speedup(SAMPLES[:2]) == pytest.approx((12 / 3.0) / (12 / 7.0))
    assert speedup(SAMPLES) == pytest.approx((19 / 7.0) / (19 / 12.0))
    assert speedup(SAMPLES, prompts=True) == pytest.approx((24 / 9.0) / (24 / 13.0))


def test_alpha_is_of_those_tried_at_a_depth_the_share_accepted():
    runs = [sample.drafted for sample in SAMPLES]
    turns = [*CUT, *SHORT, (0, 2, 1), *CUT]
    tried, alpha = alpha_by_depth(runs)
    assert len(tried) == len(alpha) == 4
    for depth in range(1, 5):
        offered = [turn for turn in turns if turn[1] >= depth]
        assert tried[depth - 1] == len(offered)
        assert alpha[depth - 1] == sum(turn[0] >= depth for turn in offered) / len(offered)
    assert alpha_by_depth([plain([5], 1.0)]) == ([], [])


def looped_by_hand(texts: list[list[int]]) -> float:
    repeated = total = 0
    for text in texts:
        for at in range(len(text) - 7):
            total += 1
            repeated += any(text[before : before + 8] == text[at : at + 8] for before in range(at))
    return repeated / total if total else 0.0


@pytest.mark.parametrize(
    "texts",
    [[[1] * 20], [list(range(30))], [[1, 2, 3] * 9, list(range(9))], [[1] * 7], [], [list(range(8)), list(range(8))]],
)
def test_the_looped_share_is_that_of_eights_that_stood_before(texts):
    assert looped(texts) == pytest.approx(looped_by_hand(texts))


def test_the_interval_holds_the_value_and_is_that_of_resampled_prompts():
    rng = random.Random(5)
    many = [
        Sample(
            "a",
            drafted([[(rng.randrange(4), 4, rng.randrange(1, 5)) for _ in range(9)]], rng.uniform(1, 2)),
            plain([30], 3.0),
        )
        for _ in range(25)
    ]
    for measured in (tau, speedup):
        figure = bootstrap(many, measured)
        assert figure.low < figure.value == measured(many) < figure.high
        drawn = [measured([many[rng.randrange(25)] for _ in range(25)]) for _ in range(1000)]
        low, *_, high = statistics.quantiles(drawn, n=40)
        width = high - low
        assert (figure.low, figure.high) == pytest.approx((low, high), abs=0.15 * width)
        assert bootstrap(many, measured) == figure
    alone = bootstrap(many[:1], tau)
    assert alone.low == alone.value == alone.high


def test_a_report_has_a_line_for_each_set_and_one_for_all():
    report = Report.of(SAMPLES[:3], {"drafter": "d"})
    assert [line.bench for line in report.lines] == ["a", "b", "all"]
    a, b, pooled = report.lines
    assert [line.prompts for line in report.lines] == [2, 2, 4]
    assert [line.rounds for line in report.lines] == [5, 4, 9]
    assert [line.tokens for line in report.lines] == [12, 7, 19]
    assert (a.tau.value, b.tau.value, pooled.tau.value) == (12 / 5, 7 / 4, 19 / 9)
    assert pooled.plain_tokens_per_second == 19 / 12.0
    assert pooled.tokens_per_second == 19 / 7.0
    assert [line.equal for line in report.lines] == [2, 2, 4]
    assert report.round_ms == pytest.approx(
        {"draft": 7000 / 8 / 9, "verify": 7000 / 2 / 9, "accept": 7000 / 8 / 9, "keep": 7000 / 4 / 9}
    )
    assert report.plain_round_ms == pytest.approx(12000 / 19)
    assert [line.bench for line in Report.of(SAMPLES[:2], {}).lines] == ["a"]


def test_outputs_that_differ_are_not_equal():
    other = Sample("a", drafted([CUT], 2.0), plain([7], 3.0))
    other.drafted.generations[0].tokens[-1] += 1
    assert [line.equal for line in Report.of([SAMPLES[1], other], {}).lines] == [1]


def test_the_report_is_shown_with_every_figure(loop, capsys):
    from rich.console import Console

    loop.report.show(Console(width=200))
    text = capsys.readouterr().out
    (line,) = loop.report.lines
    for shown in (f"{line.tau}", f"{line.speedup}", "4/4", "alpha by depth", f"(n={loop.report.tried[0]})"):
        assert shown in text
