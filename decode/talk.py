"""What decode/run.py does: measure a drafter or, where `decode.ask` says something, answer it as the text comes about."""

import sys

from conf.schema import Run
from decode.arms import arms_of
from decode.measure import check, measure, typical_of
from decode.opening import open_drafter, open_target, open_tokenizer
from decode.prompts import Dialogue
from decode.stream import Request
from models.sampling import Sampling


def decode(run: Run) -> None:
    """The job of the command."""
    if run.decode.ask is None:
        measure(run)
    else:
        answer(run)


def answer(run: Run) -> None:
    """Write what the target says to `decode.ask`, as soon as it is certain, and then what it took."""
    how = run.decode
    check(how)
    if typical_of(how):
        raise ValueError("decode.ask is answered losslessly; leave decode.accept out")
    if not (how.ask or "").strip():
        raise ValueError("decode.ask says nothing; give a question, such as decode.ask='Why is the sky blue?'")
    arm = arms_of(run)[0]
    prompt = Dialogue([how.ask or ""], open_tokenizer(run.target)).prompt()
    target = open_target(run.target)
    drafter = open_drafter(arm.folder, arm.card, target)
    sampling = Sampling(how.temperature, how.top_k, how.top_p, run.seed)
    asked = Request(target, drafter, prompt, how.tokens, arm.budget, sampling, how.stop)
    for piece in asked.pieces():
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    told = asked.statistics
    speed = (told.tokens - 1) / told.seconds if told.seconds else 0.0
    print(
        f"\n\n{told.tokens} tokens in {told.rounds} passes after {told.prompt} of the prompt: tau {told.tau:.2f}, "
        f"{speed:.1f} tokens/s; it ended by {told.reason}"
    )
