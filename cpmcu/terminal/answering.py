"""Generates one answer and shows it in the terminal with a summary of times."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from cpmcu.outputs import RequestOutput
from cpmcu.sampling import SamplingParams
from cpmcu.ui.display import Display

if TYPE_CHECKING:
    from cpmcu.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Text of an answer. `result` is None if Ctrl-C ended it."""

    text: str
    result: RequestOutput | None


def show_answer(
    display: Display,
    llm: LLM,
    ids: list[int],
    params: SamplingParams,
    *,
    stream: bool,
    full_statistics: bool,
) -> Answer:
    """Generates and shows one answer and its summary. Ctrl-C ends the answer."""
    params = params.resolve(llm.generation_config)
    progress = display.prefill_progress()
    text = ""
    result = None
    begun = False
    progress.begin(len(ids))
    try:
        with contextlib.closing(llm.stream(ids, params, on_prefill=progress)) as chunks:
            for chunk in chunks:
                begun = True
                text += chunk.text
                result = chunk.result
                if stream:
                    display.text(chunk.text)
    except KeyboardInterrupt:
        progress.finish()
        if not begun:
            wait_for_pass(display, llm)
    finally:
        progress.finish()
    display.text(("" if stream else text) + ("" if text.endswith("\n") else "\n"))
    if result is None:
        display.note("stopped")
        return Answer(text, None)
    if params.logprobs is not None:
        display.logprobs(result)
    display.summary(result, full=full_statistics, sampled=params.temperature != 0)
    return Answer(text, result)


def wait_for_pass(display: Display, llm: LLM) -> None:
    """After Ctrl-C: says that the running pass cannot be stopped, and waits for its end."""
    display.note("stopping after this pass")
    with contextlib.suppress(RuntimeError):  # the engine has failed
        llm.call_engine(lambda engine: None)
