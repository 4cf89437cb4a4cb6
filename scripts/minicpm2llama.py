"""A MiniCPM into the Llama that computes the same, under the name that CPM.cu has for it.

    python scripts/minicpm2llama.py --src DIR --dst DIR2

The same as `python -m cpmcu.convert minicpm-to-llama`; docs/converting.md says what it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works from a source tree

from cpmcu.convert.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["minicpm-to-llama", *sys.argv[1:]]))
