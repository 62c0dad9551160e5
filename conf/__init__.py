"""`conf=NAME` means conf/NAME.yaml; commands receive a checked Run."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from conf.schema import Run

ROOT = {
    "defaults": [
        "schema",
        "_self_",
        {"engine": "auto"},
        {"peft": None},
        {"joint": None},
        {"conf": "tiny"},
        {"override hydra/job_logging": "stdout"},
        {"override hydra/hydra_logging": "none"},
    ],
    "hydra": {
        "run": {"dir": "."},  # Hydra makes no folder for a run: the job makes `out` once it has nothing to complain of
        "sweep": {"dir": "outputs", "subdir": "."},
        "output_subdir": None,
        "callbacks": {"sweep": {"_target_": "train.sweep.Sweep"}},
        "job": {
            "chdir": False,
            "name": "outrider",
            "config": {"override_dirname": {"exclude_keys": ["conf", "out", "overwrite"]}},
        },
        "help": {
            "app_name": "outrider",
            "header": "Outrider: train drafters for speculative decoding, and measure what they buy.",
        },
    },
}


def run_folder(conf: str, mode: RunMode, overrides: str) -> str:
    """Where a run writes: outputs/<conf>, and in a sweep a folder below it for each member."""
    return f"outputs/{conf}/{overrides}" if mode is RunMode.MULTIRUN and overrides else f"outputs/{conf}"


def register() -> None:
    """Give Hydra the schema, and let `conf=NAME` mean the file conf/NAME.yaml."""
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=Run)
    store.store(name="run", node=ROOT)
    for file in Path(__file__).parent.glob("*.yaml"):
        store.store(group="conf", name=file.stem, node=OmegaConf.load(file), package="_global_")


def command(job: str) -> Callable[[], None]:
    """The command line of the function `job`, written module:name and imported only once the configuration is sound.

    Hydra composes, the schema checks, and a user's mistake ends in its one sentence.
    """

    def door(config: DictConfig) -> None:
        module, name = job.split(":")
        try:
            run = cast(Run, OmegaConf.to_object(config))
            getattr(import_module(module), name)(run)
        except MissingMandatoryValue as missing:
            _fail(f"{missing.full_key} is not set; give it on the command line or in your conf", missing)
        except (ValueError, OSError) as mistake:
            _fail(str(mistake), mistake)

    register()
    return hydra.main(version_base="1.3", config_path="pkg://conf", config_name="run")(door)


def named(job: str) -> Callable[[], None]:
    """The command line of a job whose first word may be a drafter's folder or Hub name, short for trained=."""

    def door() -> None:
        sys.argv[1:2] = [
            f"trained={word}" if word[0] not in "-+~" and "=" not in word else word for word in sys.argv[1:2]
        ]
        command(job)()

    return door


def _fail(sentence: str, error: Exception) -> NoReturn:
    if "HYDRA_FULL_ERROR" in os.environ:
        raise error
    sys.exit(f"error: {sentence}\n(HYDRA_FULL_ERROR=1 shows where)")


def packaged(path: str) -> Path:
    """The file that `path` names; pkg:// is the folder that holds Outrider's packages."""
    return Path(__file__).parent.parent / path.removeprefix("pkg://") if path.startswith("pkg://") else Path(path)
