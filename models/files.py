"""Files that are never seen half written."""

from pathlib import Path


def write_whole(file: Path, content: str | bytes) -> Path:
    """`content` under the name `file`, written beside it and renamed; where the disk refuses, nothing is left behind."""
    beside = file.with_name(f".{file.name}.part")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return beside.rename(file)
