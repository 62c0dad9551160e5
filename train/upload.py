"""Put an export on the Hub, with a model card made from what training and measuring wrote down."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from conf.schema import Run
from decode.figures import Figure
from decode.gather import conditions, find, read
from train.export import RECORD, export

CARD = "README.md"
DENIED = (401, 403, 404)


def share(run: Run) -> None:
    """The command: export, and where `hub` is set, send the export there."""
    if run.hub is not None:
        require_name(run.hub)
    folder = export(run)
    if run.hub is not None:
        publish(folder, run)


def upload(run: Run) -> None:
    """The command: send the export that `trained` names to the Hub repository `hub`."""
    if not run.trained:
        raise ValueError("name the folder of the export: outrider-upload FOLDER hub=user/name")
    publish(Path(run.trained), run)


def publish(folder: Path, run: Run) -> None:
    """Send `folder`, an export, to the repository that `hub` names, made private where it is new; or say what would be sent.

    What an interrupted upload has sent is not sent again.
    """
    name = require_name(run.hub)
    if not (folder / RECORD).exists():
        raise ValueError(f"{folder} holds no {RECORD}, so it is no export; write one with outrider-export")
    (folder / CARD).write_text(model_card(folder, name, run.report))
    if run.dry_run:
        for file in sorted(folder.iterdir()):
            print(f"would send {file.name} ({file.stat().st_size:,} bytes)")
        print(f"to {name}; nothing was sent")
        return
    print(f"{name} is at commit {send(folder, name)}; trained={name}@<commit> names it for good")


def require_name(hub: str | None) -> str:
    """`hub`, if it is a repository's name."""
    if hub is None or hub.count("/") != 1 or not all(hub.split("/")):
        raise ValueError(f"hub={hub} is no Hub name of the form owner/name")
    return hub


def send(folder: Path, name: str) -> str:
    """The commit that holds all of `folder`. Raises ValueError where the Hub refuses or cannot be reached."""
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return api.upload_folder(repo_id=name, folder_path=folder, commit_message="A drafter, by Outrider").oid
    except Exception as error:  # the Hub's client raises its own errors, those of its transport and the system's
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else type(error).__name__
        if status in DENIED:
            way = "log in with `hf auth login`, or name a repository of yours"
            raise ValueError(f"the Hub does not let you write to {name} ({status}); {way}") from None
        again = f"run outrider-upload {folder} hub={name} again"
        raise ValueError(f"the upload to {name} was interrupted ({status}); {again}") from None


def model_card(folder: Path, name: str, report: str | None) -> str:
    """README.md of the repository: whose drafter it is, how it was trained, what was measured, and how it is served."""
    record: dict[str, Any] = yaml.safe_load((folder / RECORD).read_text())
    training, target = record["training"], record["target"]
    optim = training.get("optim", {})
    facts = {
        "target": f"{target['name']}{f' with the adapter {worn}' if (worn := target.get('adapter')) else ''}, fingerprint {target['fingerprint']}",
        "family": f"{record['family'].rpartition('.')[2]}, {', '.join(f'{key} {value}' for key, value in record['knobs'].items())}",
        "data": f"{training.get('data')}, {training.get('conversations')} conversations, {training.get('answer_tokens')} answer tokens",
        "steps": f"{optim.get('steps')} of {optim.get('batch')} conversations, learning rate {optim.get('lr')}, seed {training.get('seed')}",
        "code": f"Outrider {training.get('outrider')}, conf {training.get('conf')}",
    }
    rates = record["acceptance"].get("greedy", [])
    head = {"library_name": "outrider", "tags": ["speculative-decoding", "drafter"], "base_model": target["name"]}
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    lines += [
        "A drafter for speculative decoding. It guesses what its target says next; the target checks the guesses, so the text stays its own.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += [
        "",
        "## Measured",
        "",
        f"First guess right on held-out text, by depth: {', '.join(f'{rate:.3f}' for rate in rates) or 'not measured'}.",
    ]
    lines += measured(report)
    lines += [
        "",
        "## Serve",
        "",
        (folder / "serve.md").read_text().split("\n", 2)[2].replace("<this folder>", name).strip(),
    ]
    lines += [
        "",
        "## Limits",
        "",
        "It drafts for this target alone, with its chat template; for text unlike its training data, and beyond the length it was trained on, it guesses less well.",
    ]
    lines += ["The licences of the data it was trained on are those of its source, named above.", ""]
    return "\n".join(lines)


def measured(report: str | None) -> list[str]:
    """What a measurement says, by set, with its intervals and the machine."""
    if report is None:
        return ["No measurement was given with report=."]
    told = read(find(Path(report))[0])
    rows = [f"| {line['bench']} | {Figure(**line['tau'])} | {Figure(**line['speedup'])} |" for line in told["lines"]]
    return ["", "| set | tau (95 %) | speed-up (95 %) |", "|---|--:|--:|", *rows, "", conditions(told)]
