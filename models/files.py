"""Files that are never seen half written, and folders that are one process's alone."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def alone_in(folder: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Within, `folder` is this process's alone. Where another holds it `busy` is called, which raises or is followed by waiting.

    The lock is the kernel's, on the folder itself: it leaves no file, and a killed process gives it back.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
