"""Metrics under the names that vLLM's shipped dashboards ask for: each is there, with its model."""

import msgspec
from millrace.contracts.ingress import EngineTimes, FinishReason
from millrace.contracts.status import BatchComposition, EngineSnapshot
from prometheus_client import CollectorRegistry, generate_latest

from services.ingress.vllm_metrics import EngineMetrics, load_report
from services.worker.metrics import WorkerCollector, WorkerFigures
from tests.unit.ingress_core import MODEL, Bench, chunk

#: Of vLLM 0.32's examples/observability (the two Grafana dashboards, and that of prometheus_grafana), and what else
#: its own tests look for.
HISTOGRAMS = (
    "e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total request_decode_time_seconds "
    "request_generation_tokens request_max_num_generation_tokens request_prefill_time_seconds request_prompt_tokens "
    "request_queue_time_seconds request_inference_time_seconds request_num_preemptions request_params_max_tokens "
    "request_params_n request_time_per_output_token_seconds time_to_first_token_seconds"
).split()
FIGURES = (
    "generation_tokens_total kv_cache_usage_perc num_requests_running num_requests_waiting prompt_tokens_total "
    "request_success_total prefix_cache_hits_total prefix_cache_queries_total admission_rejections_total "
    "num_preemptions_total num_requests_waiting_by_reason"
).split()


def test_every_metric_of_vllms_dashboards_is_told_with_its_model():
    bench = Bench()
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.pass_time(0.5)
    last = chunk("de", 3, finish=FinishReason.LENGTH)
    bench.tokens(instance, msgspec.structs.replace(last, times=EngineTimes(2_000_000_000, 3_000_000_000, 7, 1)))
    snapshot = EngineSnapshot(
        step=1, at_ns=1, running=[], waiting=[], blocks_free=3, blocks_total=4, preemptions=0, step_duration_ns=1,
        batch=BatchComposition(),
    )  # fmt: skip
    registry = CollectorRegistry()
    registry.register(bench.metrics.vllm)
    registry.register(WorkerCollector(lambda: [("w0", WorkerFigures(), snapshot, 0)], MODEL))
    text = generate_latest(registry).decode()
    told = {line.partition(" ")[0] for line in text.splitlines() if 'model_name="tiny"' in line}
    names = {sample.partition("{")[0] for sample in told}
    wanted = {f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert wanted | {f"vllm:{name}" for name in FIGURES} <= names
    for line in (
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 3.0',
        'vllm:request_generation_tokens_sum{model_name="tiny"} 5.0',
        'vllm:inter_token_latency_seconds_sum{model_name="tiny"} 0.5',
        'vllm:request_decode_time_seconds_sum{model_name="tiny"} 0.5',
        'vllm:request_queue_time_seconds_sum{model_name="tiny"} 2.0',
        'vllm:request_prefill_time_seconds_sum{model_name="tiny"} 3.0',
        'vllm:request_num_preemptions_sum{model_name="tiny"} 1.0',
        'vllm:kv_cache_usage_perc{engine="w0",model_name="tiny"} 0.25',
    ):
        assert line in text


def test_engines_are_told_at_the_apis_port_and_in_the_header_of_an_answer():
    bench = Bench()
    bench.summary("w0", running=2, waiting=3, blocks_free=3, blocks_total=4)
    bench.summary("w1", blocks_free=4, blocks_total=4)
    members = [known.member for known in bench.actor.state.cluster.instances.values()]
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: members))
    text = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{engine="w0",model_name="tiny"} 2.0',
        'vllm:num_requests_waiting{engine="w0",model_name="tiny"} 3.0',
        'vllm:kv_cache_usage_perc{engine="w0",model_name="tiny"} 0.25',
        'vllm:kv_cache_usage_perc{engine="w1",model_name="tiny"} 0.0',
    ):
        assert line in text
    assert "kv_cache_size_tokens" in text
    assert load_report(members, MODEL, "text") == (
        b"TEXT named_metrics.kv_cache_usage_perc=0.125, named_metrics.num_requests_waiting=3.0"
    )
    assert load_report(members, MODEL, "JSON") == (
        b'JSON {"named_metrics":{"kv_cache_usage_perc":0.125,"num_requests_waiting":3.0}}'
    )
    assert load_report(members, MODEL, "BINARY") == b""
