"""Acceptance metrics under vLLM's and FastDeploy's names."""

from __future__ import annotations

import io
import re
import sys

import pytest

from cpmcu.outputs import CompletionOutput, RequestOutput, Timings
from cpmcu.serving.chat.answers import metrics_of
from cpmcu.serving.metrics import Metrics
from cpmcu.spec_metrics import AcceptanceCounter, SpecDecodeMetrics
from cpmcu.ui.display import Display
from cpmcu.ui.summary import summary_line, summary_sections


def count(*emitted: int, depth: int = 3, detailed: bool = False) -> SpecDecodeMetrics:
    counter = AcceptanceCounter(depth, detailed=detailed)
    for tokens in emitted:
        counter.add(tokens, depth)
    return counter.metrics()


def test_vllm_fields():
    metrics = count(1, 4, 2, 4, 1)
    assert metrics.to_dict() == {
        "mean_acceptance_length": 12 / 5,
        "draft_acceptance_rate": 7 / 15,
        "acceptance_histogram": [2, 1, 0, 2],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 15,
        "num_spec_tokens": 3,
    }
    assert metrics.acceptance_per_position == (3 / 5, 2 / 5, 2 / 5)
    assert 1 + sum(metrics.acceptance_per_position) == pytest.approx(12 / 5)


def test_steps_with_fewer_drafted_tokens():
    counter = AcceptanceCounter(4)
    for emitted, drafted in ((2, 1), (5, 4), (1, 2)):
        counter.add(emitted, drafted)
    metrics = counter.metrics()
    assert metrics.num_draft_tokens == 7 and metrics.draft_acceptance_rate == 5 / 7
    assert metrics.to_fastdeploy()["rejected_tokens"] == 3 + 7 - 8


def test_detailed():
    assert count(1, 4, 2, detailed=True).to_dict()["per_step_accepted"] == [0, 3, 1]
    assert "per_step_accepted" not in count(1).to_dict()


def test_fastdeploy_fields():
    assert count(1, 4, 2, 4, 1).to_fastdeploy() == {
        "accepted_tokens": 12,
        "rejected_tokens": 5 * 4 - 12,
        "accept_ratio": 1 - 5 / 12,
        "average_accept_length": 12 / 5,
        "accepted_tokens_per_head": [5, 3, 2, 2],
        "accept_ratio_per_head": [3 / 5, 2 / 3, 1.0],
    }


def test_the_published_example():
    """FastDeploy's n-gram baseline: 100 tokens, accept_ratio .31, average length 1.449."""
    histogram = (56, 4, 6, 0, 0, 3)  # accepted_tokens_per_head 69, 13, 9, 3, 3, 3
    fields = SpecDecodeMetrics(5, histogram).to_fastdeploy()
    assert fields["accepted_tokens_per_head"] == [69, 13, 9, 3, 3, 3]
    assert fields["accepted_tokens"] == 100
    assert fields["accept_ratio"] == pytest.approx(0.31)
    assert fields["average_accept_length"] == pytest.approx(1.449, abs=1e-3)


def test_no_steps():
    metrics = count()
    assert metrics.mean_acceptance_length == metrics.draft_acceptance_rate == 0
    assert metrics.acceptance_per_position == (0.0, 0.0, 0.0)
    assert metrics.to_fastdeploy()["accept_ratio"] == 0
    assert count(1, 1).to_fastdeploy()["accept_ratio_per_head"] == [0.0, 0.0, 0.0]


def test_inner_steps_of_a_hierarchical_draft():
    counter = AcceptanceCounter(5)
    counter.add(3, 5, (2, 4))
    counter.add(1, 5, (1, 3))
    counter.add(1, 5)
    metrics = counter.metrics()
    fields = metrics.to_dict()
    assert (fields["mean_inner_acceptance_length"], fields["num_inner_steps"]) == (7 / 3, 3)
    timings = Timings(0.0, 0.1, 0.2, 3, 13, 5)
    output = CompletionOutput(0, "", [], "stop", None, None, timings, metrics)
    both = metrics_of([output, output])["speculative_decoding"]
    assert (both["mean_inner_acceptance_length"], both["num_inner_steps"]) == (7 / 3, 6)
    closing = summary_sections(RequestOutput([1], [output], 7))[-1].closing
    assert "inner accept length 2.33" in closing
    served = Metrics("tiny", lambda: None, dict)
    served.finished(output)
    served.finished(output)
    samples = served.render().decode()
    assert re.search(r"^cpmcu:spec_decode_num_inner_steps_total{.*} 6.0$", samples, re.MULTILINE)
    assert re.search(r"^cpmcu:spec_decode_num_inner_tokens_total{.*} 14.0$", samples, re.MULTILINE)
    assert not any("inner" in name for name in count(1, 4).to_dict())


@pytest.mark.parametrize("plain", [True, False])
def test_summary(monkeypatch, plain):
    stderr = io.StringIO()
    stderr.isatty = lambda: not plain  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    timings = Timings(0.0, 0.1, 0.2, 3, 13, 5)
    output = CompletionOutput(
        0, "x", list(range(13)), "length", None, None, timings, count(1, 4, 2, 4, 1)
    )
    Display(plain=plain).summary(RequestOutput([1, 2, 3], [output], 7))
    text = stderr.getvalue()
    assert "mean accept length 2.40" in text and "7 drafted tokens" in text
    assert "60.0%" in text and "#" * 30 in text and "#" * 31 not in text


def test_a_lossy_strategy_is_named():
    counter = AcceptanceCounter(3, verify_strategy="topp")
    counter.add(3, 3)
    metrics = counter.metrics()
    fields = metrics.to_dict()
    assert (fields["verify_strategy"], fields["lossy"]) == ("topp", True)
    timings = Timings(0.0, 0.1, 0.2, 3, 13, 5)
    output = CompletionOutput(0, "", [], "stop", None, None, timings, metrics)
    both = metrics_of([output, output])["speculative_decoding"]
    assert (both["verify_strategy"], both["num_spec_steps"]) == ("topp", 2)
    line = summary_line(RequestOutput([1], [output], 7), sampled=False)
    assert "accept length 3.00 (lossy: topp)" in line
