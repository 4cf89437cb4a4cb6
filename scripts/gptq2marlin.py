"""Converts 4-bit GPTQ weights to CPM.cu's Marlin files. CPM.cu has a program of this name.

    python scripts/gptq2marlin.py --src DIR --dst DIR2

The same as `python -m cpmcu.convert gptq-to-marlin`; see docs/converting.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works from a source tree

from cpmcu.convert.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["gptq-to-marlin", *sys.argv[1:]]))
