"""4-bit GPTQ weights into CPM.cu's Marlin files, under the name that CPM.cu has for it.

    python scripts/gptq2marlin.py --src DIR --dst DIR2

The same as `python -m cpmcu.convert gptq-to-marlin`; docs/converting.md says what it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works from a source tree

from cpmcu.convert.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["gptq-to-marlin", *sys.argv[1:]]))
