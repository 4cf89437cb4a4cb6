"""Prometheus metrics with vLLM's names, so vLLM's dashboards and benchmarks work here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from cpmcu.engine.prefix.base import CacheCounters
from cpmcu.engine.runner import EngineLoad
from cpmcu.engine.step_tokens import EDGES, StepTokens
from cpmcu.outputs import CompletionOutput
from cpmcu.sampling import SamplingParams
from cpmcu.verification import TARGET_MATCH, is_lossy

_LABELS = ("model_name", "engine")
_TTFT = "1e-3 5e-3 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
_ITL = "5e-4 1e-3 2.5e-3 5e-3 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
_LATENCY = ".05 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
_TOKENS = "1 2 5 10 20 50 100 200 500 1e3 2e3 5e3 1e4 2e4 5e4 1e5 2e5 5e5"
_CHOICES = "1 2 5 10 20 50 100"

# Key, name without prefix, help, upper bucket edges.
_HISTOGRAMS = (
    ("ttft", "time_to_first_token_seconds", "Arrival to first token.", _TTFT),
    ("itl", "inter_token_latency_seconds", "Time between two steps that emitted tokens.", _ITL),
    ("tpot", "request_time_per_output_token_seconds", "Mean time per token after the first.", _ITL),
    ("e2e", "e2e_request_latency_seconds", "Arrival to last token.", _LATENCY),
    ("queue", "request_queue_time_seconds", "Time waiting for a slot.", _LATENCY),
    ("prefill", "request_prefill_time_seconds", "Slot to first token.", _LATENCY),
    ("decode", "request_decode_time_seconds", "First to last token.", _LATENCY),
    ("inference", "request_inference_time_seconds", "Slot to last token.", _LATENCY),
    ("prompt", "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("generation", "request_generation_tokens", "Generated tokens of an output.", _TOKENS),
    ("max_tokens", "request_params_max_tokens", "max_tokens of a request.", _TOKENS),
    ("n", "request_params_n", "n of a request.", _CHOICES),
    ("preemptions", "request_num_preemptions", "Preemptions of an output.", _CHOICES),
    (
        "computed",
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of an output that were not cached.",
        _TOKENS,
    ),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("drafts", "spec_decode_num_drafts", "Steps that verified a draft."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Draft tokens."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Accepted draft tokens."),
)
# Counters of inner steps, which only hierarchical drafts take.
_INNER = (
    ("steps", "Speculative steps that drafts took themselves."),
    ("tokens", "Tokens that these steps emitted."),
)


class Metrics:
    """The counters of one server. Not thread-safe: the event loop's thread uses it."""

    def __init__(
        self,
        model_name: str,
        load: Callable[[], EngineLoad | None],
        cache_config: Callable[[], Mapping[str, str]],
        verify_strategy: str = TARGET_MATCH,
    ) -> None:
        registry = self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {
            key: Histogram(
                f"vllm:{name}",
                text,
                _LABELS,
                buckets=[float(edge) for edge in buckets.split()],
                registry=self._registry,
            ).labels(**labels)
            for key, name, text, buckets in _HISTOGRAMS
        }
        self._counters = {
            key: Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(**labels)
            for key, name, text in _COUNTERS
        }
        self._positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            (*_LABELS, "position"),
            registry=self._registry,
        )
        self._inner = {
            key: Counter(f"cpmcu:spec_decode_num_inner_{key}", text, _LABELS, registry=registry)
            for key, text in _INNER
        }
        self._finished = Counter(
            "vllm:request_success",
            "Finished outputs by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused.", _LABELS, registry=self._registry
        ).labels(**labels)
        self._labels = labels
        lossy = str(is_lossy(verify_strategy)).lower()
        Gauge(
            "cpmcu:spec_decode_verify_strategy_info",
            "How drafted tokens are accepted. A lossy strategy changes the text.",
            (*_LABELS, "verify_strategy", "lossy"),
            registry=self._registry,
        ).labels(**labels, verify_strategy=verify_strategy, lossy=lossy).set(1)
        for reason in ("stop", "length", "abort"):
            self._finished.labels(**labels, finished_reason=reason)
        self._registry.register(_OfEngine(labels, load, cache_config))

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def started(self, prompt_tokens: int, params: SamplingParams, max_length: int) -> None:
        """Counts a queued request. `max_length`: the engine's longest sequence."""
        self._histograms["prompt"].observe(prompt_tokens)
        self._histograms["n"].observe(params.n)
        if params.max_tokens is not None:
            self._histograms["max_tokens"].observe(min(params.max_tokens, max_length))

    def rejected(self) -> None:
        """Counts a request that was refused because the queue was full."""
        self._rejections.inc()

    def tokens(self, count: int, seconds: float | None) -> None:
        """Counts tokens of an output, `seconds` after its previous ones (None: the first)."""
        self._counters["generation_tokens"].inc(count)
        if seconds is not None:
            self._histograms["itl"].observe(seconds)

    def finished(self, output: CompletionOutput) -> None:
        """Records the timings and acceptance of a finished output."""
        timings = output.timings
        self._finished.labels(**self._labels, finished_reason=output.finish_reason).inc()
        observe = self._histograms
        observe["generation"].observe(timings.output_tokens)
        observe["preemptions"].observe(timings.preemptions)
        if timings.output_tokens:
            if output.index == 0:
                self._counters["prompt_tokens"].inc(timings.prompt_tokens)
            observe["computed"].observe(timings.computed_tokens)
            observe["ttft"].observe(timings.time_to_first_token_s)
            observe["e2e"].observe(timings.time_to_first_token_s + timings.decode_s)
            observe["queue"].observe(timings.queue_s)
            observe["prefill"].observe(timings.prefill_s)
            observe["decode"].observe(timings.decode_s)
            observe["inference"].observe(timings.prefill_s + timings.decode_s)
        if timings.output_tokens > 1:
            observe["tpot"].observe(timings.decode_s / (timings.output_tokens - 1))
        spec = output.spec_decode_metrics
        if spec is None:
            return
        self._counters["drafts"].inc(spec.num_spec_steps)
        self._counters["draft_tokens"].inc(spec.num_draft_tokens)
        self._counters["accepted_tokens"].inc(spec.num_accepted_draft_tokens)
        if spec.num_inner_steps:
            self._inner["steps"].labels(**self._labels).inc(spec.num_inner_steps)
            self._inner["tokens"].labels(**self._labels).inc(spec.num_inner_tokens)
        for position in range(spec.num_spec_tokens):
            accepted = sum(spec.acceptance_histogram[position + 1 :])
            self._positions.labels(**self._labels, position=str(position)).inc(accepted)


class _OfEngine(Collector):
    """Metrics that are read from the engine at each scrape."""

    def __init__(
        self,
        labels: dict[str, str],
        load: Callable[[], EngineLoad | None],
        cache_config: Callable[[], Mapping[str, str]],
    ) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._load = load
        self._cache_config = cache_config

    def collect(self) -> Iterator[Any]:
        """Yields the current values."""
        load = self._load() or EngineLoad(0, 0, 0.0, 0)
        gauges = (
            ("num_requests_running", "Running outputs (those with a slot).", load.running),
            ("num_requests_waiting", "Outputs waiting for a slot.", load.waiting),
            ("kv_cache_usage_perc", "KV pages in use, 0 to 1.", load.kv_cache_usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        yield self._waiting(load)
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions",
            "Preempted outputs.",
            labels=self._names,
        )
        preemptions.add_metric(self._values, load.preemptions)
        yield preemptions
        yield self._steps(load.step_tokens)
        yield from self._prefix_cache(load.prefix_cache or CacheCounters())
        cache = self._cache_config()
        if cache:
            names = [*self._names, *cache]
            info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=names)
            info.add_metric([*self._values, *cache.values()], 1)
            yield info

    def _waiting(self, load: EngineLoad) -> GaugeMetricFamily:
        """Waiting outputs by vLLM's reasons. Here the only reason is a missing slot or page."""
        found = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Outputs waiting, by reason.",
            labels=[*self._names, "reason"],
        )
        for reason, count in (("capacity", load.waiting), ("deferred", 0)):
            found.add_metric([*self._values, reason], count)
        return found

    def _prefix_cache(self, cache: CacheCounters) -> Iterator[Any]:
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", cache.queries),
            ("vllm:prefix_cache_hits", "Of these, tokens that were cached.", cache.hits),
            (
                "cpmcu:prefix_cache_host_hits",
                "Of the hits, tokens that came from host memory.",
                cache.host_hits,
            ),
            (
                "cpmcu:prefix_cache_disk_hits",
                "Tokens that were read from disk, to host memory.",
                cache.disk_hits,
            ),
            ("cpmcu:prefix_cache_evicted_pages", "Pages that left the device.", cache.evicted),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter
        pages = GaugeMetricFamily(
            "cpmcu:prefix_cache_pages",
            "Cached pages now, used or idle; one may lie in several tiers.",
            labels=[*self._names, "tier"],
        )
        tiers = {"device": cache.pages, "host": cache.host_pages, "disk": cache.disk_pages}
        for tier, count in tiers.items():
            pages.add_metric([*self._values, tier], count)
        yield pages

    def _steps(self, steps: StepTokens) -> HistogramMetricFamily:
        counts = itertools.accumulate(steps.counts)
        edges = [*(str(float(edge)) for edge in EDGES), "+Inf"]
        found = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of a step: prompt tokens plus generated tokens.",
            labels=self._names,
        )
        found.add_metric(self._values, list(zip(edges, counts)), steps.total)
        return found
