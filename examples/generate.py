"""Completes two prompts with the small Python model that ships with cpmcu."""

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from cpmcu import LLM, SamplingParams

with LLM() as llm:
    prompts = ["def fibonacci(n):\n", "import os\nimport sys\n\n\ndef main():\n"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=60)):
        print(llm.tokenizer.decode(output.prompt_token_ids) + output.text)
        print(f"--- {output.timings.decode_tokens_per_s:.0f} tokens/s, seed {output.seed}")
