"""How processes share a run: one holds everything, or several hold copies (accelerate) or parts (torch, DeepSpeed) of it.

An engine wraps the one module that is trained. Its arithmetic is the same for all of them, and so are the names under
which it gives and takes what a checkpoint remembers, so a run may go on under another engine or on other ranks.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, reduce
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from conf.schema import Features, Kind, Optim, Run
from models.drafter import FeatureBatch, Loss
from models.files import alone_in
from models.target import decoder_layers
from models.transfer import sent
from train.optim import optimizer_for
from train.trainee import Trainee

MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine:
    """Every rank holds the whole trainee: one process, or data parallelism by accelerate."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.device = self.accelerator.device
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.first = self.rank == 0

    def start(self, trainee: Trainee, optim: Optim) -> None:
        """Wrap `trainee`, whose weights are in place, and make its optimizer."""
        self.trainee: Trainee = trainee
        self.module: Any = self.accelerator.prepare(trainee)
        self.optimizer: Any = optimizer_for(trainee.groups(), optim)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row."""
        return init_device_mesh(self.device.type, (self.ranks,))

    def spread(self, target: PreTrainedModel) -> None:
        """Share the layers of a frozen `target` out among the ranks, from main memory to their devices one by one.

        A pass gathers each layer while it needs it, so every rank must make every pass. Embedding, head and last norm,
        which a drafter reads as they are, stand whole on each.
        """
        target.eval().requires_grad_(False)
        layers = decoder_layers(target, target.config.get_text_config(decoder=True).num_hidden_layers)
        others = set(target.parameters()) - set(layers.parameters())
        for layer in layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(target.base_model, mesh=self.mesh, ignored_params=others)  # lets the next layer come meanwhile
        target.to(self.device)

    def learn(self, batch: FeatureBatch, counted: Tensor, last: bool) -> Tensor:
        """Add the gradient of `batch`, its loss divided by `counted`, and return that loss.

        Until the `last` micro-batch of a step gradients are only added up; then ranks exchange them.
        """
        with self._exchanging(last):
            loss = self._total(batch) / counted
            self._backward(loss * self.ranks)  # ranks are averaged over; this is a sum
        return loss.detach()

    def step(self, rate: float, optim: Optim) -> Tensor:
        """Clip the gradient as `optim` says, take a step at `rate` and forget it; the norm it had."""
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self._trained()], optim.clip)
        if optim.clip_value is not None:
            for _, parameter in self._trained():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-optim.clip_value, optim.clip_value)
        self._set(rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole(norm.detach())

    def whole(self) -> AbstractContextManager[Any]:
        """Within, every rank has all of the trainee's weights in place: to evaluate, decode and save."""
        return nullcontext()

    def remembered(self) -> dict[str, Tensor]:
        """Weights, buffers and moments by name, whole and in main memory: all ranks must ask, the first is answered."""
        with self.whole():
            made = {f"model.{name}": self._kept(value) for name, value in weights_of(self.trainee).items()}
        for name, parameter in self._trained():
            for slot, value in self._moments(parameter).items():
                made[f"optimizer.{name}.{slot}"] = self._kept(value)
        return made if self.first else {}

    def recall(self, tensors: dict[str, Tensor]) -> None:
        """Take the moments back that `remembered` gave. The weights are put in place before `start`."""
        for name, parameter in self._trained():
            mine = {
                key.rpartition(".")[2]: value
                for key, value in tensors.items()
                if key.rpartition(".")[0] == f"optimizer.{name}"
            }
            if mine:
                self.optimizer.state[parameter] = {slot: self._part(value, parameter) for slot, value in mine.items()}

    def sum(self, value: Tensor) -> Tensor:
        """`value` added up over the ranks."""
        return reduce(sent(value, self.device), "sum")

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """The values of all ranks, the first rank's first."""
        return list(gather_object(list(values))) if self.ranks > 1 else list(values)

    def agree(self, value: Any) -> Any:
        """The first rank's `value`, on all ranks."""
        return broadcast_object_list([value])[0] if self.ranks > 1 else value

    @contextmanager
    def owning(self, out: Path) -> Iterator[None]:
        """Within, the folder `out` is this run's alone. Raises ValueError where another run holds it."""
        with ExitStack() as held:
            refused = None
            try:
                if self.first:
                    held.enter_context(alone_in(out, partial(refuse_second, out)))
            except ValueError as busy:
                refused = str(busy)
            if refused := self.agree(refused):
                raise ValueError(refused)
            yield

    def wait(self) -> None:
        """Until all ranks are here."""
        self.accelerator.wait_for_everyone()

    def end(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.trainee.named_parameters() if p.requires_grad]

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self.module)

    def _total(self, batch: FeatureBatch) -> Tensor:
        total: Tensor = self.module(batch).total
        return total

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {slot: whole(value) for slot, value in self.optimizer.state.get(parameter, {}).items()}

    def _part(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of `value`, a slot of `parameter`'s moments; the count of steps stays where AdamW wants it."""
        return value.to(parameter.device) if value.dim() else value

    def _kept(self, value: Tensor) -> Tensor:
        return value.detach().to("cpu", copy=True).contiguous() if self.first else value


class Fsdp2(Engine):
    """Each rank holds its part of every weight, gradient and moment; a step gathers the weights while it needs them."""

    def start(self, trainee: Trainee, optim: Optim) -> None:
        self.trainee, self.module = trainee, fully_shard(trainee, mesh=self.mesh)
        self.optimizer = optimizer_for(trainee.groups(), optim)

    @contextmanager
    def whole(self) -> Iterator[None]:
        parts = dict(self.trainee.named_parameters())
        replace(
            self.trainee, {name: nn.Parameter(whole(part.detach()), part.requires_grad) for name, part in parts.items()}
        )
        try:
            yield
        finally:
            replace(self.trainee, parts)

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def _part(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        if not value.dim():
            return value
        assert isinstance(parameter, DTensor)
        return distribute_tensor(value.to(self.device), parameter.device_mesh, parameter.placements)


class Anchored(nn.Module):
    """The trainee with an input that has a gradient: ZeRO-3 lets a module's weights go once its inputs have theirs."""

    def __init__(self, trainee: Trainee):
        super().__init__()
        self.trainee = trainee

    def forward(self, batch: FeatureBatch, anchor: Tensor) -> Loss:
        loss: Loss = self.trainee(batch)
        return loss._replace(total=loss.total + 0 * anchor)


class Zero(Engine):
    """DeepSpeed's ZeRO: moments (stage 1), gradients (2) and weights (3) are shared out among the ranks."""

    def __init__(self, stage: int, offload: bool = False):
        super().__init__()
        self.stage, self.offload = stage, offload

    def start(self, trainee: Trainee, optim: Optim) -> None:
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        import deepspeed  # takes seconds: only this engine needs it

        # gloo serves as well; this extension is compiled for minutes, and a killed compiler's lock stops every later start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

        self.deepspeed, self.trainee = deepspeed, trainee
        deepspeed.logger.setLevel("WARNING")
        anchored = Anchored(trainee)
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        deepspeed.utils.set_z3_leaf_module(anchored, True)  # weights come together: a drafter may read any, at any time
        config = {
            "train_micro_batch_size_per_gpu": optim.batch,
            "gradient_accumulation_steps": optim.accumulate,
            "gradient_clipping": optim.clip,
            "zero_optimization": {
                "stage": self.stage,
                **({"offload_optimizer": {"device": "cpu"}} if self.offload else {}),
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # its own AdamW is compiled for minutes; torch's does the same
        }
        optimizer = optimizer_for(trainee.groups(), optim)
        self.module, self.optimizer, *_ = deepspeed.initialize(model=anchored, optimizer=optimizer, config=config)

    def step(self, rate: float, optim: Optim) -> Tensor:
        self._set(rate)
        self.module.step()
        return torch.as_tensor(self.module.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def whole(self) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self.deepspeed.zero.GatheredParameters(list(self.trainee.parameters()))
        return gathered

    def recall(self, tensors: dict[str, Tensor]) -> None:
        steps = [value for name, value in tensors.items() if name.startswith("optimizer.") and name.endswith(".step")]
        if not steps:
            return
        for flat in self._flats():
            self._state[flat] = {"step": steps[0].clone(), **{slot: torch.zeros_like(flat) for slot in MOMENTS}}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()  # its first step would link them, too late for us
        for name, parameter in self._trained():
            for slot in MOMENTS:
                self._place(parameter, slot, tensors[f"optimizer.{name}.{slot}"].to(self.device))

    def _place(self, parameter: nn.Parameter, slot: str, value: Tensor) -> None:
        """Write this rank's part of `value` into its share of the moments."""
        kit = self.deepspeed.utils
        if self.stage < 3:
            kit.safe_set_full_optimizer_state(parameter, value, slot)
            return
        size = kit.safe_get_local_optimizer_state(parameter, slot).numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self.ranks - value.numel()))
        kit.safe_set_local_optimizer_state(parameter, padded[size * self.rank :][:size], slot)

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if not self._state:
            return {}
        step = self._state[self._flats()[0]]["step"]
        full = self.deepspeed.utils.safe_get_full_optimizer_state
        return {"step": step, **{slot: full(parameter, slot) for slot in MOMENTS}}

    @property
    def _state(self) -> dict[Tensor, dict[str, Tensor]]:
        """What AdamW remembers of this rank's flat parts."""
        state: dict[Tensor, dict[str, Tensor]] = self.optimizer.optimizer.state
        return state

    def _flats(self) -> list[Tensor]:
        """The flat fp32 parts of the weights that this rank updates."""
        held = (
            self.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else self.optimizer.single_partition_of_fp32_groups
        )
        return list(held)

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def _total(self, batch: FeatureBatch) -> Tensor:
        total: Tensor = self.module(batch, self.anchor).total
        return total

    def _backward(self, loss: Tensor) -> None:
        self.module.backward(loss, scale_wrt_gas=False)


STAGES = {Kind.zero1: 1, Kind.zero2: 2, Kind.zero3: 3}


def engine_for(kind: Kind, offload: bool = False) -> Engine:
    """The engine of this kind, once `check` has found no fault with it."""
    if kind in STAGES:
        return Zero(STAGES[kind], offload)
    return Fsdp2() if kind is Kind.fsdp2 else Engine()


def check(kind: Kind, ranks: int, offload: bool = False, clip_value: float | None = None) -> None:
    """Raise ValueError where this kind of engine cannot run here on `ranks` processes."""
    if offload and kind not in STAGES:
        raise ValueError(
            f"engine.offload=true is for engine=zero1, zero2 or zero3, not {kind.value}; choose one of them or leave it out"
        )
    if clip_value is not None and kind in STAGES:
        raise ValueError(
            f"engine={kind.value} clips the gradient's norm alone; set optim.clip_value=null, or choose engine=ddp or fsdp2"
        )
    if kind in STAGES and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            f"engine={kind.value} needs deepspeed, which is not installed; pip install deepspeed, or choose engine=ddp or fsdp2"
        )
    if kind is Kind.single and ranks > 1:
        raise ValueError(f"engine=single is one process and {ranks} were started; start one, or choose engine=ddp")
    if kind not in (Kind.auto, Kind.single) and ranks == 1:
        raise ValueError(
            f"engine={kind.value} shares work among processes and there is one; start it with torchrun --nproc_per_node 2 -m train, or choose engine=single"
        )


def check_target(run: Run, ranks: int) -> None:
    """Raise ValueError where the target cannot be shared out among so many ranks, whose every pass must be a pass of all."""
    why = None
    if ranks == 1:
        why = "shares the target among processes and there is one; start it with torchrun --nproc_per_node 2 -m train, or leave it out"
    elif run.data.features is Features.cached:
        why = "is for a target that reads while it teaches; with data.features=cached each process reads for itself: write the features first with scripts/extract.py and target.device_map=auto, then leave it out"
    elif run.log.prompts:
        why = "does not go with log.prompts, where each process decodes by itself; set log.prompts=0"
    elif run.target.device_map or run.target.quantization:
        why = "does not go with target.device_map or target.quantization, which place the target themselves; choose one"
    elif run.target.adapter and not run.target.merge:
        why = "does not go with an adapter applied on the fly; set target.merge=true"
    if run.engine.shard_target and why:
        raise ValueError(f"engine.shard_target=true {why}")


def refuse_second(out: Path) -> None:
    """Raise ValueError: another run has `out`."""
    raise ValueError(f"another run is writing to {out}; wait for it, or choose another folder with out=")


def whole(value: Tensor) -> Tensor:
    """`value`, gathered where each rank holds a part."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights_of(trainee: nn.Module) -> dict[str, Tensor]:
    """The trained weights and the buffers of `trainee` by name: what of it a checkpoint remembers."""
    trained = {name: parameter.detach() for name, parameter in trainee.named_parameters() if parameter.requires_grad}
    return trained | dict(trainee.named_buffers())


def put(weights: dict[str, Tensor], trainee: nn.Module) -> None:
    """Give `trainee` the weights and buffers that `weights_of` gave."""
    own = weights_of(trainee)
    for name, value in weights.items():
        own[name].copy_(value)


def replace(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Let `module` have these `parameters` under their names."""
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, parameter)
