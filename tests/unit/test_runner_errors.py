"""The generate loop if the engine cannot sample a token."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from test_runner import Job, script, start

from cpmcu.errors import OutputError

__all__ = ["start"]


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_logits_that_are_not_finite_fail_their_request_alone(start, caplog, first, burst):
    """The engine emits -1 in place of such a token."""
    bad, good = Job(max_tokens=20, key=1), Job(max_tokens=20, key=2)
    position = len(bad.prompt) + first
    engine = FakeEngine(
        lambda key, at: -1 if key == 1 and at >= position else script(key, at), burst=burst
    )
    runner = start(engine)
    runner.submit(bad.request, good.request)
    with pytest.raises(OutputError, match=rf"logits for token {first + 1} .* not finite"):
        bad.wait()
    assert [t for chunk in bad.chunks for t in chunk.token_ids] == bad.expected(first)
    assert good.wait().token_ids == good.expected(20)
    assert "not finite" in caplog.text and "Traceback" not in caplog.text
    again = Job(key=3)
    runner.submit(again.request)
    assert again.wait().token_ids == again.expected(10)
