"""Where processes that tests start look for modules."""

import os
from pathlib import Path


def python_path(folder: Path) -> str:
    """PYTHONPATH with a folder in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
