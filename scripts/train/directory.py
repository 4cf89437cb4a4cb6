"""Write a folder as a whole: the destination is the old one or the new one, never half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_directory(destination: Path) -> Iterator[Path]:
    """Yield an empty folder beside `destination`; on success it takes the destination's name.

    If the body raises, the folder is removed and the destination is left as it was.
    """
    destination = destination.absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{destination.name}."
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        if destination.exists():
            old = Path(tempfile.mkdtemp(prefix=prefix, suffix=".old", dir=destination.parent))
            os.rename(destination, old / "content")
            os.rename(temporary, destination)
            shutil.rmtree(old)
        else:
            os.rename(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
