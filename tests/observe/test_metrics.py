"""Series under every name that somebody reads, with values that add up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from penstock.engine.queue import RequestQueue
from penstock.messages import EngineInfo, EngineState, EngineStats, RequestTiming
from penstock.observe.costs import CostModel, IdlePeak, MachinePeak, StepCosts
from penstock.observe.histogram import Histogram
from penstock.observe.metrics import Metrics
from penstock.observe.model_metrics import ModelMetrics
from tests.engine.processes import children, command_line
from tests.patience import wait_for

INFO = EngineInfo(
    model="m",
    revision="r",
    vocab_size=10,
    max_model_len=64,
    max_num_seqs=8,
    block_size=16,
    num_blocks=(100, 20),
    dtype="bfloat16",
    incarnation=1,
    pid=1,
)


class Engine:
    """An engine with numbers to read."""

    info = INFO
    state = EngineState("ready", 2)

    def __init__(self) -> None:
        self.now = EngineStats()
        self.queue = RequestQueue(max_num_seqs=8, max_waiting=4, max_waiting_tokens=100, clock=lambda: 0.0)

    def stats(self) -> EngineStats:
        return self.now


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def model(metrics: Metrics, engine: Engine) -> ModelMetrics:
    return metrics.model("m", engine)


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of a scrape, as `name{label=value,...}`."""
    body, _ = metrics.render()
    return {
        sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}": sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def test_vllms_names_can_be_left_out(engine: Engine) -> None:
    both, ours = Metrics(CollectorRegistry()), Metrics(CollectorRegistry(), vllm_names=False)
    for each in (both, ours):
        each.model("m", engine)
    assert set(samples(ours)) == {name for name in samples(both) if not name.startswith("vllm:")}
    assert len(samples(ours)) < len(samples(both)) * 2 / 3


@pytest.mark.parametrize("prefix", ["penstock_", "vllm:"])
def test_the_engines_numbers_are_read_at_the_scrape(
    metrics: Metrics, model: ModelMetrics, engine: Engine, prefix: str
) -> None:
    engine.now = EngineStats(
        steps=7,
        running=3,
        waiting=2,
        blocks_total=(100, 20),
        blocks_held=(25, 10),
        blocks_cached=(5, 0),
        preemptions=4,
        prefix_queries=1000,
        prefix_hits=600,
        computed_tokens=500,
        drafts=9,
        draft_tokens=30,
        accepted_tokens=14,
        accepted_at=(8, 4, 2),
        step_seconds=2.5,
        disk_blocks=12,
        disk_reads=40,
        disk_failures=2,
    )
    found = samples(metrics)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.5,
        "engine_healthy": 1,
        "num_preemptions_total": 4,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 600,
        "kv_disk_blocks": 12,
        "kv_disk_reads_total": 40,
        "kv_disk_failures_total": 2,
        "engine_steps_total": 7,
        "engine_computed_tokens_total": 500,
        "engine_step_seconds_total": 2.5,
        "spec_decode_num_drafts_total": 9,
        "spec_decode_num_draft_tokens_total": 30,
        "spec_decode_num_accepted_tokens_total": 14,
    }
    assert {name: found[f"{prefix}{name}{{model_name=m}}"] for name in expected} == expected
    by_place = [f"{prefix}spec_decode_num_accepted_tokens_per_pos_total{{model_name=m,position={i}}}" for i in range(3)]
    assert [found[name] for name in by_place] == [8, 4, 2]
    config = f"{prefix}cache_config_info{{block_size=16,cache_dtype=bfloat16,model_name=m,num_gpu_blocks=120}}"
    assert found[config] == 1


def test_an_engine_that_has_ended_runs_nothing(metrics: Metrics, model: ModelMetrics, engine: Engine) -> None:
    engine.now = EngineStats(steps=7, running=3, waiting=2, blocks_total=(100,), blocks_held=(25,))
    engine.state = EngineState("ended", 2)
    found = samples(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_healthy"):
        assert found[f"penstock_{name}{{model_name=m}}"] == 0
    assert found["penstock_engine_steps_total{model_name=m}"] == 7


@pytest.mark.parametrize("prefix", ["penstock_", "vllm:"])
def test_a_requests_life_is_counted(metrics: Metrics, model: ModelMetrics, prefix: str) -> None:
    model.request_prefilled("chat", 100, 0.5)
    model.tokens_arrived(1, 0.0)
    model.tokens_arrived(1, 0.02)
    model.tokens_arrived(4, 0.4)
    model.engine_timed(RequestTiming(queued=0.1, prefill=0.4, decode=0.42))
    model.choice_finished("chat", "stop", 6, 0.42)
    model.request_finished("chat", 0.92)
    model.choices_cut_short("abort", 2)
    found = samples(metrics)
    for name, count, total in [
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 5, 0.42),
        ("e2e_request_latency_seconds", 1, 0.92),
        ("request_queue_time_seconds", 1, 0.1),
        ("request_prefill_time_seconds", 1, 0.4),
        ("request_decode_time_seconds", 1, 0.42),
        ("request_time_per_output_token_seconds", 1, 0.084),
        ("request_prompt_tokens", 1, 100),
        ("request_generation_tokens", 1, 6),
    ]:
        assert found[f"{prefix}{name}_count{{model_name=m}}"] == count, name
        assert found[f"{prefix}{name}_sum{{model_name=m}}"] == pytest.approx(total), name
    assert found[f"{prefix}prompt_tokens_total{{model_name=m}}"] == 100
    assert found[f"{prefix}generation_tokens_total{{model_name=m}}"] == 6
    assert found[f"{prefix}inter_token_latency_seconds_bucket{{le=0.025,model_name=m}}"] == 1
    assert found[f"{prefix}inter_token_latency_seconds_bucket{{le=0.1,model_name=m}}"] == 5
    reasons = {reason: found[f"{prefix}request_success_total{{finished_reason={reason},model_name=m}}"] for reason in
               ("stop", "length", "abort", "error")}  # fmt: skip
    assert reasons == {"stop": 1, "length": 0, "abort": 2, "error": 0}


def test_latencies_by_operation_under_opentelemetrys_names(metrics: Metrics, model: ModelMetrics) -> None:
    for operation, seconds in (("chat", 0.5), ("text_completion", 2.0), ("chat", 1.5)):
        model.request_prefilled(operation, 10, seconds)
        model.choice_finished(operation, "length", 3, seconds)
        model.request_finished(operation, seconds)
    found = samples(metrics)
    labels = "gen_ai_operation_name={},gen_ai_provider_name=penstock,gen_ai_request_model=m"
    for name, factor in (("request_duration", 1.0), ("time_to_first_token", 1.0), ("time_per_output_token", 0.5)):
        for operation, count, total in (("chat", 2, 2.0), ("text_completion", 1, 2.0)):
            series = f"gen_ai_server_{name}_seconds_{{}}{{{{{labels.format(operation)}}}}}"
            assert found[series.format("count")] == count
            assert found[series.format("sum")] == pytest.approx(total * factor)


def test_tokens_of_a_step_are_seen_between_deltas(metrics: Metrics, model: ModelMetrics, engine: Engine) -> None:
    model.tokens_arrived(1, 0.0)  # nothing has stepped yet
    engine.now = EngineStats(steps=1, computed_tokens=512)
    model.tokens_arrived(1, 0.1)
    model.tokens_arrived(1, 0.1)  # of the same step
    engine.now = EngineStats(steps=3, computed_tokens=512 + 64)
    model.tokens_arrived(1, 0.1)
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_count{model_name=m}"] == 3
    assert found["vllm:iteration_tokens_total_sum{model_name=m}"] == 576
    assert found["vllm:iteration_tokens_total_bucket{le=32.0,model_name=m}"] == 2


def test_http_requests_by_route_and_code(metrics: Metrics) -> None:
    metrics.http_request("POST", "/v1/completions", 200)
    metrics.http_request("POST", "/v1/completions", 200)
    metrics.http_request("GET", "other", 404)
    found = samples(metrics)
    assert found["penstock_http_requests_total{code=200,method=POST,route=/v1/completions}"] == 2
    assert found["penstock_http_requests_total{code=404,method=GET,route=other}"] == 1


def test_two_models_in_one_registry_and_a_name_only_once(metrics: Metrics, model: ModelMetrics, engine: Engine) -> None:
    other = metrics.model("other", engine)
    other.tokens_arrived(3, 0.0)
    model.tokens_arrived(1, 0.0)
    found = samples(metrics)
    assert found["vllm:generation_tokens_total{model_name=m}"] == 1
    assert found["vllm:generation_tokens_total{model_name=other}"] == 3
    with pytest.raises(ValueError, match="'m'"):
        metrics.model("m", engine)


def test_both_formats_parse(metrics: Metrics, model: ModelMetrics) -> None:
    model.request_prefilled("chat", 1, 0.1)
    text, kind = metrics.render()
    assert kind.startswith("text/plain")
    assert list(parse_text(text.decode()))
    openmetrics, kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert any(family.name == "vllm:prompt_tokens" for family in parse_openmetrics(openmetrics.decode()))


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, count in ((0.1, 1), (0.5, 2), (1.0, 1), (5.0, 1)):
        histogram.observe(value, count)
    assert histogram.buckets() == [("0.1", 1.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(7.1)


def test_the_parts_of_a_step_and_their_work(metrics: Metrics, engine: Engine) -> None:
    costs = StepCosts(lambda tokens: 1000.0 + tokens, (10, 100), layer_flops=2.0, head_flops=5.0)
    measured: list[int] = []
    peak = IdlePeak(lambda: measured.append(1) or MachinePeak(1e6, 1e9))  # type: ignore[func-returns-value]
    metrics.model("m", engine, CostModel(costs, peak))
    engine.now = EngineStats(
        steps=4,
        running=3,
        computed_tokens=100,
        decode_tokens=30,
        draft_tokens=10,
        blocks_total=(9, 9),
        blocks_held=(7, 2),
    )
    found = samples(metrics)
    assert found["penstock_engine_prefill_tokens_total{model_name=m}"] == 60
    assert found["penstock_engine_decode_tokens_total{model_name=m}"] == 30
    assert found["penstock_engine_read_bytes_total{model_name=m}"] == 4 * (1025 + 70 + 200)
    assert found["penstock_engine_flops_total{model_name=m}"] == 100 * 2 + 40 * 5
    assert found["vllm:iteration_tokens_total_sum{model_name=m}"] == 100
    assert not measured  # requests run
    engine.now = EngineStats(steps=4, computed_tokens=100, decode_tokens=30, draft_tokens=10)
    beside = Engine()
    metrics.model("beside", beside, CostModel(costs, IdlePeak(lambda: MachinePeak(1.0, 1.0))))
    beside.now = EngineStats(running=1)
    samples(metrics)
    assert not measured  # another model has requests
    beside.now = EngineStats()
    flops = "penstock_machine_flops_per_second{model_name=m}"
    wait_for(lambda: flops in samples(metrics), "a thread that measures")
    found = samples(metrics)
    assert measured == [1]
    other = "penstock_machine_flops_per_second{model_name=beside}"
    wait_for(lambda: other in samples(metrics), "the other model is measured after it")
    assert found["penstock_machine_read_bytes_per_second{model_name=m}"] == 1e6
    assert found["penstock_machine_flops_per_second{model_name=m}"] == 1e9
    assert found["penstock_engine_read_bytes_total{model_name=m}"] == 4 * (1025 + 70 + 200)


def test_what_dashboards_for_older_vllm_read(metrics: Metrics, model: ModelMetrics, engine: Engine) -> None:
    engine.now = EngineStats(blocks_total=(100,), blocks_held=(25,), prefix_queries=10, prefix_hits=6)
    model.tokens_arrived(1, 0.0)
    model.tokens_arrived(1, 0.02)
    model.choice_finished("chat", "stop", 2, 0.02)
    found = samples(metrics)
    expected = {
        "gpu_cache_usage_perc": 0.25,
        "cpu_cache_usage_perc": 0,
        "num_requests_swapped": 0,
        "gpu_prefix_cache_queries_total": 10,
        "gpu_prefix_cache_hits_total": 6,
        "time_per_output_token_seconds_sum": 0.02,
        "request_max_num_generation_tokens_sum": 2,
    }
    assert {name: found[f"vllm:{name}{{model_name=m}}"] for name in expected} == expected
    assert found["vllm:lora_requests_info{max_lora=0,running_lora_adapters=,waiting_lora_adapters=}"] == 1


def test_the_engines_process_is_measured_with_its_children(metrics: Metrics, engine: Engine) -> None:
    code = "import subprocess, sys; x = bytearray(64 << 20); subprocess.run(['sleep', '60'])"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        engine.info = msgspec.structs.replace(INFO, pid=process.pid)
        metrics.model("m", engine)
        wait_for(lambda: list(map(command_line, children(process.pid))) == ["sleep 60"], "the child of the child")
        memory = samples(metrics)["penstock_engine_resident_memory_bytes{model_name=m}"]
        assert 64 << 20 < memory < 256 << 20
        assert samples(metrics)["penstock_engine_cpu_seconds_total{model_name=m}"] > 0
        own = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        (pid,) = children(process.pid)
        child = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert memory == pytest.approx(own + child, rel=0.1)
    finally:
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert "penstock_engine_resident_memory_bytes{model_name=m}" not in samples(metrics)


def test_the_api_process_is_measured(metrics: Metrics) -> None:
    found = samples(metrics)
    assert found["process_resident_memory_bytes{}"] > 10 << 20
    assert found["process_open_fds{}"] > 2
    assert found["process_cpu_seconds_total{}"] > 0
