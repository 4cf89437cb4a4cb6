"""The server's log lines and metrics."""

from __future__ import annotations

import json
import time

from tests.e2e.calls import FIRST


def test_log_lines_are_json(limited):
    body = {"prompt": "x", "max_tokens": 2, "temperature": 0}
    limited.post("/v1/completions", body, **FIRST, **{"X-Request-Id": "q7"})
    mine: list[dict[str, object]] = []
    for _ in range(100):  # the line of a request is written after its response
        lines = [json.loads(line) for line in limited.log.splitlines()]
        mine = [line for line in lines if line["request_id"] == "q7"]
        if len(mine) == 2:
            break
        time.sleep(0.05)
    assert mine[0]["completion_tokens"] == 2
    assert mine[1]["status"] == 200
    assert {"ms", "path", "method", "client", "time", "level"} <= mine[1].keys()


def test_names_of_metrics(server):
    """The metrics that vLLM's dashboards and benchmark read."""
    server.post("/v1/completions", {"prompt": "x = 1\n", "max_tokens": 20, "ignore_eos": True})
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_prefill_kv_computed_tokens_count",
        "vllm:request_num_preemptions_count",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ):
        assert server.metric(name) >= 0
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == 4 * drafts > 0
