"""Files that are never seen half written, folders that are one process's alone, and the user's cache."""

import fcntl
import os
import shutil
import tempfile
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


def cache_home() -> Path:
    """Where Outrider keeps what it can make again: $OUTRIDER_CACHE, or ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def made_once(name: str, make: Callable[[Path], None], shelf: str = "targets") -> Path:
    """The folder `name` on a `shelf` of the cache; `make` fills it the first time, and only a finished one gets the name."""
    home = cache_home() / shelf
    final = home / name
    if not final.exists():
        home.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
        try:
            make(unfinished)
            try:
                unfinished.rename(final)
            except OSError:
                if not final.exists():  # otherwise another process was faster, and its folder is as good
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final
