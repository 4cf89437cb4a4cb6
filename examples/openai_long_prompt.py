"""Completes a file and shows the progress of prefill: openai_long_prompt.py prompt.txt

examples/long_prompt_gen.py writes such a file. OPENAI_BASE_URL and OPENAI_API_KEY say where the
server is and what key it wants.
"""

import os
import sys
from pathlib import Path

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from openai import OpenAI

if len(sys.argv) != 2:
    sys.exit("usage: openai_long_prompt.py FILE (examples/long_prompt_gen.py writes one)")
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
stream = client.completions.create(
    model=client.models.list().data[0].id,
    prompt=Path(sys.argv[1]).read_text("utf-8"),
    max_tokens=60,
    stream=True,
    extra_body={"return_progress": True},
)
for chunk in stream:
    progress = getattr(chunk, "prompt_progress", None)
    if progress:
        seconds = progress["time_ms"] / 1000
        print(f"{progress['processed']} of {progress['total']} tokens after {seconds:.1f} s")
    for choice in chunk.choices:
        print(choice.text, end="", flush=True)
print()
