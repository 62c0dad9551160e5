"""What a measurement says, against generations counted by hand."""

import json
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.schema import Accept, Decode, Proposal
from conftest import bench_prompts
from decode.arms import Arm, arm_of, arms_of, budget_for, holds_for
from decode.choice import CHAIN, DYNAMIC, PLAINLY, STATIC, Choice, Option, keep, recall
from decode.engine import generate
from decode.measure import check, measure, settings
from decode.opening import find_beside, find_drafter, open_drafter, open_target
from decode.prompts import conversations
from decode.report import Report
from decode.tune import tune
from models.drafter import Budget, Plain
from models.shelf import Card, read_card, write_card
from models.tree import chain, ordered_paths, published_trees
from runs import ROOT, changed, composed
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
        "regenerate.tokens=21", f"data.path={folder}/said.jsonl", "data.heldout=4", "data.features=cached",
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
    assert sum(depth.tried for depth in loop.report.depths) == sum(sum(one.offered) for one in drafted)
    assert sum(loop.report.by_node) == sum(sum(one.accepted) for one in drafted)
    assert len(loop.report.by_node) == len(card.tree)
    assert line.speedup.value == pytest.approx(line.tokens_per_second / line.plain_tokens_per_second)


def test_the_report_is_written_and_says_what_it_was_taken_with(loop):
    (folder,) = (loop.out / "measure").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "report.json"]
    written = json.loads((folder / "report.json").read_text())
    assert written == loop.report.to_json()
    assert written["version"] == 3
    assert Report.read(folder / "report.json") == loop.report
    taken = written["settings"]
    assert (taken["drafter"], taken["target"], taken["dtype"]) == ("tiny", "tiny", "float32")
    assert taken["tree"] == [list(path) for path in ordered_paths(read_card(loop.out).tree[:9])]
    assert taken["nodes"] == len(taken["tree"]) + 1 > 2
    assert (taken["tokens"], taken["temperature"], taken["rows"]) == (21, 0.0, 1)
    assert taken["accept"] == "lossless"
    assert taken["cpu"]


TUNE = ("tune.rows=[1,3]", "tune.contexts=[20]", "tune.nodes=6", "tune.prompts=2", "tune.tokens=12")


def test_what_is_tuned_is_decoded(loop, capsys):
    """The command measures, prints and keeps one choice for each batch; what is chosen is what run.py proposes."""
    run = composed(*EXACT, *TUNE, f"trained={loop.out}", "decode.depth=3", "decode.tree=tuned", "decode.longest=40")
    with pytest.raises(ValueError, match=r"nothing was tuned for tiny on this machine; run python -m decode\.tune"):
        arms_of(run)
    tune(run)
    shown = capsys.readouterr().out
    assert shown.count("ms of reading n nodes: 1: ") == 2
    assert "batch 1, context 20: " in shown
    assert "batch 3, context 20: " in shown
    arm = arms_of(changed(composed(*EXACT, f"trained={loop.out}"), "decode.tree", "auto"))[0]
    made = recall("tiny", holds_for(run, arm), rows=3, context=20)
    assert (made.rows, made.context) == (3, 20)
    assert made.speedup >= 1

    def tuned(option: Option) -> Budget:
        keep("tiny", holds_for(run, arm), [], [Choice(1, 20, option, 2.0, 1.5, 30.0)])
        return arms_of(run)[0].budget

    assert tuned(Option(CHAIN, 3, 2)).paths == ((0,), (0, 0))
    assert tuned(Option(CHAIN, 3, 2, 0.1)) == Budget((), 3, 2, 1, 0.1)
    assert tuned(Option(DYNAMIC, 6, 3, 0.2)) == Budget((), 6, 3, run.decode.branch, 0.2)
    best = [tuple(path) for path in read_card(loop.out).tree[:3]]
    assert tuned(Option(STATIC, 4, 2)).paths == tuple(ordered_paths(best))
    with pytest.raises(ValueError, match=r"no tree of tiny pays on this machine, so plain decoding was chosen"):
        tuned(PLAINLY)
    with pytest.raises(ValueError, match="was measured with target tiny, and here it is huge: a curve of other"):
        arms_of(changed(run, "target.name", "huge"))


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("tune.rows", [], "tune.rows=[] measures nothing; name numbers of at least 1"),
        ("tune.contexts", [0], "tune.contexts=[0] measures nothing; name numbers of at least 1"),
        ("tune.nodes", 1, "tune.nodes=1 measures nothing; give at least 2"),
        ("decode.temperature", 0.5, "decode.tune measures greedy acceptance; leave decode.temperature at 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_weights_load(setting, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tune(changed(composed(), setting, value))


def test_contexts_beyond_the_targets_are_refused():
    with pytest.raises(ValueError, match=r"tune.contexts=\[9999\] and a tree of 16 exceed the \d+ tokens of tiny"):
        tune(composed("drafter=ngram", "tune.contexts=[9999]"))


def test_the_raw_log_gives_the_written_figures_and_the_explanation_is_printed(loop, tmp_path, capsys):
    how = ["decode.rows=3", "decode.trace=true", "decode.explain=true", f"decode.beside=[{loop.out}]"]
    report = measure(composed(*EXACT, f"trained={loop.out}", *how, f"decode.out={tmp_path}/here"))
    shown = capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "here").iterdir()) == [
        "report.html", "report.json", "report_out.json", "trace.jsonl",
    ]  # fmt: skip
    found = runpy.run_path(str(ROOT / "scripts" / "recompute.py"))["recompute"](tmp_path / "here" / "trace.jsonl")
    assert list(found) == ["tiny", "out"]
    for name, suffix in (("tiny", ""), ("out", "_out")):
        written = Report.read(tmp_path / "here" / f"report{suffix}.json")
        assert found[name]["tau"] == pytest.approx(written.lines[-1].tau.value)
        assert found[name]["speedup"] == pytest.approx(written.lines[-1].speedup.value)
        assert found[name]["num_accepted_tokens_per_pos"] == written.counters["num_accepted_tokens_per_pos"]
    same = Report.read(tmp_path / "here" / "report_out.json").lines[-1].tau_over_first  # the same drafter twice
    assert same is not None
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    assert report.lines[-1].tau_over_first is None
    assert "tau over tiny's, prompt by prompt  tiny 1.00 (1.00-1.00)" in shown
    assert "A round yields" in shown
    assert report.cost.nodes[-1] >= report.settings["nodes"]
    assert len(report.overlap) == 2  # two heads
    assert all(0 < share <= 1 for share in report.overlap)
    assert report.divergences == []
    assert report.sample["prompt"].startswith("user:")
    assert {piece["by"] for piece in report.sample["pieces"]} <= {0, 1, 2}


def test_prompts_side_by_side_are_counted_one_by_one(loop, tmp_path):
    how = ["decode.rows=3", "decode.tree=chain", "decode.depth=2", f"decode.out={tmp_path}/here"]
    report = measure(composed(*EXACT, f"trained={loop.out}", *how))
    (line,) = report.lines
    assert (line.prompts, line.equal) == (4, 4)
    assert report.settings["tree"] == [[0], [0, 0]]
    assert line.tau.value > 1.5
    assert (tmp_path / "here" / "report.json").exists()


def test_typical_acceptance_is_called_so_and_lossy(loop, tmp_path, capsys):
    how = ["decode.accept=typical", "decode.temperature=0.7", "decode.epsilon=0.2", f"decode.out={tmp_path}/here"]
    report = measure(composed(*EXACT, f"trained={loop.out}", *how))
    assert (report.settings["accept"], loop.report.settings["accept"]) == ("typical", "lossless")
    assert "typical acceptance, lossy" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match=r"epsilon=2\.0 delta=0.3 is no typical acceptance"):
        measure(composed(*EXACT, f"trained={loop.out}", *how, "decode.epsilon=2.0"))


def test_a_drafter_of_another_target_is_refused_before_weights_load(loop, monkeypatch):
    monkeypatch.setattr("decode.measure.open_target", None)
    with pytest.raises(ValueError, match=r"was trained for tiny \(fingerprint"):
        measure(composed(*EXACT, f"trained={loop.out}", "target.random.initializer_range=0.1"))
    with pytest.raises(ValueError, match=r"was trained for tiny \(width 64\); tiny has width 32"):
        measure(composed(*EXACT, f"trained={loop.out}", "target.random.hidden_size=32"))


REFUSED = [
    (
        "bench",
        ["nope"],
        "there is no benchmark 'nope'; use banking, gsm8k, humaneval, math_reasoning, mbpp, medical, mt_bench, qa",
    ),
    ("bench", [], "decode.bench is empty"),
    ("tree", "bush", "decode.tree=bush; use auto, chain, dynamic, tuned, or a list of paths such as [[0],"),
    ("tree", [], "decode.tree=[]; use auto"),
    ("tree", [0, 1], "decode.tree=[0, 1]; use auto"),
    ("tree", [[0], [1, 0]], "the tree lists [1, 0] without its parent [1]"),
    ("tree", [[0], [0]], "the tree lists [0] twice"),
    ("tree", [[0], [0, 0], [0, 0, 0]], "the tree is 3 deep and this drafter has 2 heads"),
    ("prompts", 0, "decode.prompts=0 measures nothing; give at least 1"),
    ("tokens", 1, "decode.tokens=1 measures nothing; give at least 2"),
    (
        "proposal",
        Proposal.sampled,
        "decode.proposal=sampled has nothing to draw at temperature 0; set decode.temperature",
    ),
    ("least", 1.0, "decode.least=1.0 is no probability; give one from 0"),
    ("nodes", 1, "decode.nodes=1 measures nothing; give at least 2"),
    ("rows", 0, "decode.rows=0"),
    ("depth", 0, "decode.depth=0"),
    ("longest", 3, "no prompt of tiny is within decode.longest=3 tokens; raise it (the shortest has 28)"),
    ("turns", 0, "decode.turns=0 measures nothing; give at least 1"),
    ("turns", 2, "decode.turns=2, and the longest conversation chosen from tiny has 1; ask for fewer"),
    ("temperature", -1.0, "temperature=-1.0"),
    ("top_p", 0.0, "top_p is in (0, 1]"),
    ("top_p", 1.5, "top_p is in (0, 1]"),
    ("top_k", -1, "top_k are at least 0"),
    (
        "accept",
        Accept.typical,
        "decode.accept=typical at temperature 0 is greedy decoding; set decode.temperature above 0",
    ),
    ("tokens", 9999, "exceed the 2048 tokens of tiny"),
]


TALKS = [["Hi.", "And then?", "Bye."], ["What is one?"], ["Name a colour.", "Another."], ["Up?", "Down?"]]


@pytest.mark.parametrize("rows", [1, 3])
def test_conversations_are_decoded_turn_by_turn_after_the_targets_own_answers(
    loop, tmp_path, rows, monkeypatch, capsys
):
    read: list[tuple[bool, list[int]]] = []

    def seen(target, drafter, prompts, **how):
        read.extend((isinstance(drafter, Plain), prompt) for prompt in prompts)
        return generate(target, drafter, prompts, **how)

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


def test_a_published_tree_is_taken_whole_by_its_name():
    budget = budget_for(Decode(tree="zephyr_stage2", nodes=5), Card("f", {}, {}, []))
    assert budget == Budget(tuple(ordered_paths(published_trees()["zephyr_stage2"])), 64, 4)


def card_of(folder: Path, tree: list[list[int]]) -> Path:
    """A drafter of which there is only the card: no weights can be loaded."""
    knobs = {"heads": 2, "head": "shared"}
    folder.mkdir()
    write_card(Card("models.medusa.Medusa", knobs, {"name": "n", "fingerprint": "f", "width": 1}, [], tree), folder)
    return folder


@pytest.mark.parametrize(
    ("tree", "how", "sentence"),
    [
        ([], {"tree": "zephyr_stage2"}, "the tree is 4 deep and this drafter has 2 heads; choose a shallower tree"),
        ([], {"tree": "chain", "depth": 3}, "the tree is 3 deep and this drafter has 2 heads"),
        ([[0], [0, 0], [0, 0, 0]], {}, "the tree is 3 deep and this drafter has 2 heads"),
        ([[0], [1, 0]], {}, r"the tree lists \[1, 0\] without its parent \[1\]; add the parent"),
        ([[0], [0]], {}, r"the tree lists \[0\] twice; list every node once"),
    ],
)
def test_a_tree_that_does_not_fit_its_drafter_is_refused_with_the_card_alone(tmp_path, tree, how, sentence):
    with pytest.raises(ValueError, match=sentence):
        arm_of("x", card_of(tmp_path / "x", tree), Decode(**how))


def test_drawn_trees_have_the_shapes_of_others_but_none_is_dynamic():
    card = Card("f", {}, {}, [], tree=[[0], [1]])
    assert budget_for(Decode(proposal=Proposal.sampled), card) == Budget(((0,), (1,)), 10, 4, sampled=True)
    own = budget_for(Decode(proposal=Proposal.sampled), Card("f", {}, {}, []))
    assert (own.paths, own.sampled) == ((), True)
    with pytest.raises(ValueError, match=r"decode.tree=dynamic takes the likeliest branches, which are not drawn"):
        check(Decode(proposal=Proposal.sampled, temperature=1.0, tree="dynamic"))
    with pytest.raises(ValueError, match=r"would look at a drawn guess before it lets it stand"):
        check(Decode(proposal=Proposal.sampled, temperature=1.0, tree="chain", least=0.1))


def test_the_settings_say_which_tree_was_measured(loop):
    run = composed(*EXACT)
    card = Card("", {}, {}, [])
    told = [
        settings(run, Arm("x", loop.out, card, budget), open_target(run.target))
        for budget in (Budget((), 7, 4, 3), Budget(tuple(chain(2)), 7, 4))
    ]
    assert [(one["nodes"], one["tree"]) for one in told] == [
        (7, {"depth": 4, "branch": 3, "least": 0.0}),
        (3, [[0], [0, 0]]),
    ]


def test_a_drafter_that_recommends_no_tree_grows_its_own():
    own, other = Card("", {}, {}, []), Card("", {}, {}, [], [[0], [1]])
    for card, tree in ((own, "auto"), (own, "dynamic"), (other, "dynamic")):
        assert budget_for(Decode(tree=tree, nodes=7, depth=3, branch=2), card) == Budget((), 7, 3, 2)
    for card in (own, other):  # unlikely paths can be left out of dynamic trees and chains alone
        assert budget_for(Decode(least=0.1), card) == Budget((), 10, 4, 4, 0.1)
        assert budget_for(Decode(tree="chain", least=0.1), card) == Budget((), 5, 4, 1, 0.1)
        with pytest.raises(ValueError, match=r"decode.least chooses among paths by their probability"):
            budget_for(Decode(tree=[[0]], least=0.1), card)


def test_drafters_side_by_side_are_measured_in_one_table(loop, tmp_path, capsys):
    measure(composed(*EXACT, f"trained={loop.out}", f"decode.beside=[{loop.out}]", f"decode.out={tmp_path}/here"))
    first, second = (json.loads((tmp_path / "here" / f"report{name}.json").read_text()) for name in ("", "_out"))
    assert first["settings"]["drafter"] == "tiny"
    assert second["settings"]["drafter"] == "out"
    for ours, theirs in zip(first["lines"], second["lines"], strict=True):
        same = ("tokens", "rounds", "tau", "equal", "plain_tokens_per_second")  # one plain arm for both
        assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    table = capsys.readouterr().out.split("equal")[-1]
    assert re.findall(r"^ *(plain|tiny|out) +[\d.]+ ", table, re.MULTILINE) == ["plain", "tiny", "out"]


def test_drafters_that_need_no_training_need_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = ("drafter=ngram", "decode.bench=[tiny]", "decode.prompts=2", "decode.tokens=12", "decode.beside=[ngram]")
    report = measure(composed(*EXACT, "drafter.shortest=1", *how, "decode.out=here", "decode.rows=2"))
    assert report.lines[0].equal == 2
    beside = json.loads((tmp_path / "here" / "report_ngram.json").read_text())
    assert (report.settings["drafter"], beside["settings"]["drafter"]) == ("tiny", "ngram")
    assert report.settings["folder"] is beside["settings"]["folder"] is None


def test_a_part_whose_family_needs_training_is_no_drafter_yet():
    with pytest.raises(ValueError, match="there is no drafter folder 'medusa'"):
        find_beside("medusa")


def test_drawn_proposals_are_measured_on_the_same_text(loop, tmp_path):
    how = ("decode.proposal=sampled", "decode.temperature=0.5", f"decode.out={tmp_path}/here")
    report = measure(composed(*EXACT, f"trained={loop.out}", *how))
    assert report.settings["proposal"] == "sampled"
    assert report.lines[0].tau.value > 1


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
