"""Medusa-2 (Cai et al. 2024, section 2.2.2): the target learns together with its heads, and stays a language model.

What learns is LoRA beside the decoder's linear layers, or the decoder itself; embedding and head stay as they are, so
that whoever reads them alone reads the right ones. The same trains a target without any heads, for a domain.

B rows, T positions.
"""

import json
import math
import os
import shutil
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.schema import Balance, Features, Joint, Kind, Run, Teacher
from models.adapter import linear_layers
from models.drafter import Drafter, FeatureBatch, Loss, ahead
from models.losses import Head, Objective, wide
from models.questions import Questions
from models.shelf import replace_folder
from models.source import Identity, identify
from models.target import Target, device_of, resolve_dtype
from models.transfer import sent
from models.vocabulary import DraftVocabulary
from models.worn import BASE, Worn, save_whole, wearing
from train.features import Rows, laid_out

ROWS = 256  # positions whose logits exist at the same time when two targets are compared
NORMED = 3  # activations that a norm leaves of each of its own: what it read, the same scaled, and as the weight multiplies it


class Unread:
    """Conversations alone: a target that learns reads them whenever they teach."""

    waits = False

    def __init__(self, device: torch.device):
        self.device = device

    def read(self, rows: Rows) -> FeatureBatch:
        """Tokens, mask, documents and positions, and nothing that a target made of them."""
        ids, mask, document, position = laid_out(rows)
        ids, position = sent(ids, self.device), sent(position, self.device)
        nothing = torch.empty(*ids.shape, 0, device=self.device)
        return FeatureBatch(ids, mask, document, position, nothing, nothing)


class Moving(nn.Module):
    """The target as far as it learns: its parameters, what they are taught, and the target that comes of it."""

    def __init__(self, target: Target, how: Joint, steps: int):
        super().__init__()
        self.target, self.how, self.steps = target, how, steps
        self.first = int(how.heads_first * steps)  # the step from which the target moves
        self.step = 0
        self.objective = Objective("kl" if how.teacher is Teacher.self else "ce")
        self.words = DraftVocabulary(None, target.ends.vocabulary)
        self.peft: Any = None
        self.model: nn.Module = target.model
        if how.r is None:
            for parameter in target.body.parameters():
                parameter.requires_grad_(parameter is not target.ends.embedding)
        else:
            self._attach(how.r)

    def _attach(self, r: int) -> None:
        """Put LoRA, which changes nothing yet, on the decoder's linear layers."""
        from peft import LoraConfig, PeftModel  # takes seconds, and only such a run needs it

        names = named(self.target.body, self.how)
        chosen = self.how.targets or sorted({name.rpartition(".")[2] for name in names})
        settings = LoraConfig(r=r, lora_alpha=self.how.alpha, target_modules=chosen, task_type="CAUSAL_LM")  # type: ignore[arg-type]
        settings.base_model_name_or_path = self.target.identity.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what peft and transformers still call by old names
            peft = PeftModel(self.target.model, settings)
        object.__setattr__(self, "peft", peft)  # the model that it wraps is named once

    def read(self, batch: FeatureBatch) -> FeatureBatch:
        """`batch` with what the target makes of it as it is now."""
        return self.target.studied(batch.input_ids, batch.loss_mask, batch.document, batch.position)

    def without(self) -> AbstractContextManager[Any]:
        """Within, the adapter is off: the target as it was."""
        found: AbstractContextManager[Any] = self.peft.disable_adapter()
        return found

    def loss(self, drafter: Drafter, batch: FeatureBatch) -> Loss:
        """The target's own loss and its heads', weighed; at first the heads' alone, on a target that stays.

        The weight counts in the loss and in what of its gradient reaches the target. The heads themselves learn as if it
        were 1: AdamW steps as far whatever the scale of a gradient, but long remembers that of the steps before.
        """
        if self.step < self.first:
            with torch.no_grad():
                now = self.read(batch)
            return drafter.training_loss(now)
        before = batch
        if self.how.teacher is Teacher.self:
            with torch.no_grad(), self.without():
                before = self.read(batch)
        now, weight = self.read(batch), self.weight()
        heads = drafter.training_loss(replace(now, last_hidden=softly(now.last_hidden, weight)))
        return heads._replace(total=self.own(before, now) + heads.total + (weight - 1) * heads.total.detach())

    def own(self, before: FeatureBatch, now: FeatureBatch) -> Tensor:
        """[] the sum over all tokens that the target says: -log of their probability, or KL(before || now)."""
        asked = Questions.where([said(now.loss_mask, now.document)]).on(now.last_hidden.device)
        ((row, at),) = asked.places
        # a drafter's guess of depth 1 at t is token t + 2, its teacher the hidden state at t + 1: the target's own is one before
        asked = asked._replace(places=[(row, at - 1)])
        ends, states = self.target.ends, [now.last_hidden[row, at]]
        head = Head(ends.head, ends.bias, ends.finish)
        return self.objective.loss(before, asked, states, head, ends, self.words, measure=False).total

    def weight(self) -> float:
        """What the heads' loss weighs in this step: lambda_0, or lambda_0 sin(pi / 2 * share of the joint steps done)."""
        if self.how.balance is Balance.constant:
            return self.how.weight
        done = (self.step - self.first) / (self.steps - self.first)
        return self.how.weight * math.sin(math.pi / 2 * done)

    def trained(self) -> list[nn.Parameter]:
        """What of the target learns."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save(self, folder: Path, base: Path) -> Identity:
        """Keep the target in `folder`, its adapter alone or all of it as the checkpoint `base`; which target that is."""
        beside = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        identity = self.target.identity
        if self.peft is not None and not self.how.merge:
            self.peft.save_pretrained(beside, save_embedding_layers=False)
            (beside / "README.md").unlink()  # an empty form
            (beside / BASE).write_text(json.dumps({"name": identity.name, "fingerprint": identity.fingerprint}))
            replace_folder(beside, folder)
            return wearing(identity, Worn.of(str(folder)))
        if self.peft is not None:
            self.peft.merge_and_unload()
        save_whole(self.target.model, base, beside)
        replace_folder(beside, folder)
        return identify(folder, str(folder))


def softly(values: Tensor, share: float) -> Tensor:
    """`values`, that pass on a `share` of their gradient."""
    return values.detach() + share * (values - values.detach())


def said(loss_mask: Tensor, document: Tensor) -> Tensor:
    """[B, T] after which tokens the target speaks, in the same conversation."""
    return ahead(loss_mask, 1) & (ahead(document + 1, 1) == document + 1)


class Shift:
    """How far a target has moved, over the tokens that it says in held-out text."""

    def __init__(self, target: Target):
        self.ends = target.ends
        self.sums = torch.zeros(5, dtype=torch.float64)

    @torch.no_grad()
    def see(self, before: FeatureBatch, now: FeatureBatch) -> None:
        """Take in a batch, as the target read it before it learned and as it reads it now."""
        asking = said(now.loss_mask, now.document).nonzero(as_tuple=True)
        row, at = (sent(part, now.last_hidden.device) for part in asking)
        label = now.input_ids[row, at + 1]
        for part in torch.arange(len(row), device=row.device).split(ROWS):
            old, new = (
                wide(self.ends.logits(batch.last_hidden[row[part], at[part]].to(self.ends.head.dtype))).log_softmax(-1)
                for batch in (before, now)
            )
            nll = [-one.gather(1, label[part, None]).sum() for one in (old, new)]
            kl = nn.functional.kl_div(new, old, reduction="sum", log_target=True)
            same = (old.argmax(-1) == new.argmax(-1)).sum()
            counts = torch.tensor(float(len(part)), device=row.device)
            self.sums += torch.stack([counts, *nll, kl, same.float()]).double().cpu()

    def told(self) -> dict[str, float]:
        """Perplexity before and now, mean KL(before || now) in nats, and the share of places with the same likeliest token."""
        count, old, new, kl, same = self.sums.tolist()
        before, now = torch.tensor([old / count, new / count]).exp().tolist()
        found = {"perplexity_before": before, "perplexity": now, "kl": kl / count, "agreement": same / count}
        return {name: round(value, 4) for name, value in found.items()}


def outline(how: Joint | None, model: PreTrainedModel) -> tuple[int, float, int]:
    """Of a target without its numbers: how many parameters learn, how many activations a token leaves for the backward pass,
    and how often its weights are multiplied in a step.

    A backward pass counts once for the states and, where weights learn, once more for them.
    """
    if how is None:
        return 0, 0.0, 1
    body = model.base_model
    parts = [part for part in body.modules() if type(part) is nn.Linear]
    scales = [weight.numel() for weight in body.parameters() if weight.ndim == 1]  # of norms, and a few biases
    kept = float(sum(part.in_features + part.out_features for part in parts) + NORMED * sum(scales))
    teacher = how.teacher is Teacher.self
    if how.r is None:
        embedding = model.get_input_embeddings().weight
        return sum(p.numel() for p in body.parameters() if p is not embedding), kept, 3 + teacher
    chosen = [cast(nn.Linear, body.get_submodule(name)) for name in named(body, how)]
    return sum(how.r * (part.in_features + part.out_features) for part in chosen), kept, 2 + teacher


def named(body: nn.Module, how: Joint) -> list[str]:
    """The decoder's linear layers that get an adapter."""
    return linear_layers(body, how.targets, "joint.targets", "the target's decoder")


def way_to(run: Run, folder: Path) -> str:
    """The settings with which a command takes the target that the run has left in `folder`."""
    assert run.joint is not None
    if run.joint.r is not None and not run.joint.merge:
        return f"target.adapter={folder}"
    made = [f" target.{part}=null" for part in ("wheel", "random", "adapter") if getattr(run.target, part) is not None]
    return f"target.name={folder}{''.join(made)}"


def check(run: Run, family: type[Drafter]) -> None:
    """Raise ValueError, before anything loads, where the target cannot learn in this way."""
    how, optim = run.joint, run.optim
    assert how is not None
    adapter, whole = how.r is not None, how.r is None or how.merge
    dtype = resolve_dtype(run.target.dtype, device_of(run.target.device))
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 or run.engine.kind not in (Kind.auto, Kind.single)
    sentences = (
        (
            family.moves_target,
            f"{family.__name__} reads a frozen target; joint= trains Medusa and Hydra heads with theirs",
        ),
        (
            run.data.features is Features.online,
            "data.features=cached: features of a target that learns change with every step; set data.features=online",
        ),
        (not several, "a target that learns is trained by one process; start one, with engine=single"),
        (
            run.peft is None,
            "peft= is an adapter on the drafter of a frozen target; joint= trains both, so leave peft out",
        ),
        (
            not (run.target.quantization or run.target.device_map),
            "a target that learns is loaded as it is, on one device; leave target.quantization and target.device_map out",
        ),
        (
            how.alpha > 0 and (how.r is None or how.r > 0),
            f"joint.r={how.r} joint.alpha={how.alpha}: r is at least 1, or null for the decoder itself, and alpha above 0",
        ),
        (
            how.weight >= 0 and how.heads_rate > 0,
            f"joint.weight={how.weight} joint.heads_rate={how.heads_rate}: the weight is not below 0 and the rate above 0",
        ),
        (
            0 <= how.heads_first < 1 and optim.steps,
            f"joint.heads_first={how.heads_first}: it is the share of optim.steps={optim.steps} before the target moves, from 0 to less than 1, and a step must be left",
        ),
        (
            adapter or how.teacher is Teacher.data,
            "joint.teacher=self is the target with its adapter off; set joint.r, or joint.teacher=data",
        ),
        (
            adapter or dtype.itemsize >= 4,
            "joint.r=null trains the target's own weights, in full precision; set target.dtype=fp32",
        ),
        (
            not run.target.adapter or (run.target.merge and whole),
            "a target that wears target.adapter= learns with that merged, and is saved whole; set target.merge=true joint.merge=true",
        ),
    )
    for sound, sentence in sentences:
        if not sound:
            raise ValueError(sentence)
