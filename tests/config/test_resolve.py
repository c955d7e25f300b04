"""From what was said to a complete configuration: defaults with their reasons, contradictions, and no torch."""

import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config import ConfigError, DoesNotFit, EngineConfig, ModelFacts, Resolved, ServerConfig, read_settings
from penstock.config import resolve as resolve_settings
from penstock.config.defaults import DEFAULTS, Divide
from penstock.config.facts import PoolingFacts
from penstock.config.settings import Settings
from tests.config.models import FULL, GIB, MIXED, SMALL, WINDOWED, machine


def resolve(facts: ModelFacts = SMALL, gib: float = 16, folder: str = "/models/tiny", **flags: Any) -> Resolved:
    return resolve_settings(read_settings(flags), whole(facts), machine(gib), folder=folder)


def whole(facts: ModelFacts) -> Divide:
    """Every rank has as much as the model, for what does not depend on how it is divided."""
    return lambda split, group: [facts] * split.world


def test_every_setting_has_a_declared_default_and_a_source() -> None:
    assert set(DEFAULTS) | {"model"} == set(Settings.model_fields)
    resolved = resolve()
    assert set(resolved.provenance) == set(Settings.model_fields)
    assert all(source.startswith("default: ") for _, source in resolved.provenance.values())


def test_what_is_said_reaches_engine_and_server() -> None:
    resolved = resolve(
        model="org/tiny",
        revision="v2",
        served_model_name="mine",
        host="::1",
        port=0,
        api_processes=1,
        grpc_port=8001,
        api_key="secret",
        admin_key="operator",
        allowed_host="llm.example.com",
        trusted_proxy="127.0.0.1, 10.0.0.0/8",
        api_key_file="keys",
        sleep_after=600.0,
        tls_certificate="cert.pem",
        tls_key="key.pem",
        cors_origin=["https://app.example.com"],
        manage_models=True,
        wires="ollama, kserve",
        state_dir="/var/lib/penstock",
        seed=7,
        device="cpu",
        deterministic=True,
        dtype="float32",
        quantization="int4",
        quantization_group=64,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_memory="100MiB",
        kv_cache_dtype="int8",
        enable_prefix_caching=False,
        watermark="gumbel",
        watermark_key="0123456789abcdef",
        max_waiting=5,
        max_waiting_tokens=6,
        target_itl=25.0,
        threads=1,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        expert_parallel=True,
        distributed_executor="process",
        step_deadline=3,
        event_log="events.jsonl",
        max_body_size="1MiB",
        max_answer_size="2MiB",
        max_prompts=2,
        max_choices=3,
        max_sequences=4,
        max_logprobs=0,
        max_stop_strings=1,
        max_priority=3,
        max_in_flight=9,
        tool_format="hermes",
        reasoning_format="none",
        thinking_budget=100,
        truncate_embeddings=True,
        context_policy="summarise:ours",
        repository="models",
        repository_cache="3MiB",
        providers="providers.yaml",
        load_model=("ranker",),
        client_shared_memory=1 << 20,
        rate_limit_resource=("memory:4",),
        max_loaded=2,
        min_stay=5.0,
        drain_timeout=1.5,
        shutdown_delay=0.5,
        request_timeout=20.0,
        first_token_timeout=2.5,
        log_format="json",
        log_level="debug",
        access_log=0.25,
        vllm_metrics=False,
        otlp_endpoint="http://localhost:4318",
        generation_config="none",
        replicas=1,
        scale_down_after=120.0,
        hold_timeout=5.0,
        preemption_notice="notice",
        engines="host:1",
        region="north",
        route="round-robin",
        move_anywhere=True,
        fleet_key="of the fleet",
        fleet_ca="ca.pem",
    )
    assert resolved.engine == EngineConfig(
        model="/models/tiny",
        name="mine",
        revision="v2",
        deterministic=True,
        dtype="float32",
        quantization="int4",
        quantization_group=64,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_bytes=100 << 20,
        kv_cache_dtype="int8",
        enable_prefix_caching=False,
        watermark="gumbel",
        watermark_key="0123456789abcdef",
        max_waiting=5,
        max_waiting_tokens=6,
        target_itl=25.0,
        threads=1,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        expert_parallel=True,
        distributed_executor="process",
        depth=2,
        step_deadline=3.0,
        log_format="json",
        log_level="debug",
        region="north",
        event_log="events.jsonl",
    )
    assert resolved.server == ServerConfig(
        served_model_name="mine",
        host="::1",
        port=0,
        api_processes=1,
        grpc_port=8001,
        api_key="secret",
        admin_key="operator",
        allowed_host=("llm.example.com",),
        trusted_proxy=("127.0.0.1", "10.0.0.0/8"),
        api_key_file="keys",
        sleep_after=600.0,
        tls_certificate="cert.pem",
        tls_key="key.pem",
        cors_origin=("https://app.example.com",),
        manage_models=True,
        wires=("ollama", "kserve"),
        state_dir="/var/lib/penstock",
        seed=7,
        max_body_bytes=1 << 20,
        max_answer_bytes=2 << 20,
        max_prompts=2,
        max_choices=3,
        max_sequences=4,
        max_logprobs=0,
        max_stop_strings=1,
        max_priority=3,
        max_in_flight=9,
        tool_format="hermes",
        reasoning_format="none",
        thinking_budget=100,
        truncate_embeddings=True,
        context_policy="summarise:ours",
        repository="models",
        repository_cache=3 << 20,
        providers="providers.yaml",
        load_model=("ranker",),
        client_shared_memory=1 << 20,
        rate_limit_resource=("memory:4",),
        max_loaded=2,
        min_stay=5.0,
        drain_timeout=1.5,
        shutdown_delay=0.5,
        request_timeout=20.0,
        first_token_timeout=2.5,
        log_format="json",
        log_level="debug",
        access_log=0.25,
        vllm_metrics=False,
        otlp_endpoint="http://localhost:4318",
        replicas="1",
        scale_down_after=120.0,
        hold_timeout=5.0,
        preemption_notice="notice",
        engines="host:1",
        region="north",
        route="round-robin",
        move_anywhere=True,
        fleet_key="of the fleet",
        fleet_ca="ca.pem",
    )
    said = {name: source for name, (_, source) in resolved.provenance.items() if not source.startswith("default")}
    of_gpus = {"gpu_memory_utilization", "enforce_eager"}
    of_one_rank = {"speculation", "num_speculative_tokens", "kv_disk", "kv_host", "prefill_replicas"}
    of_tenants = {"tenants", "quota_redis", "ledger_days", "request_log", "request_log_share"}
    of_tenants |= {"audit", "audit_file", "audit_heads", "audit_key_file"}
    assert set(said) == set(Settings.model_fields) - {"allow_insecure_bind"} - of_gpus - of_one_rank - of_tenants
    assert set(said.values()) == {"command line"}
    assert resolved.provenance["api_key"][0] == "(hidden)"
    assert resolved.provenance["kv_cache_memory"] == (100 << 20, "command line")


def test_settings_of_tenants_reach_engine_and_server() -> None:
    given = {"tenants": "t.yaml", "quota_redis": "redis://h", "ledger_days": 30, "audit": "required", "audit_file": "a"}
    given |= {"audit_heads": "h", "audit_key_file": "k", "request_log": "r", "request_log_share": 0.1}
    resolved = resolve(**given, host="0.0.0.0")
    assert {name: getattr(resolved.server, name) for name in given} == given
    assert resolved.engine.has_tenants and not resolve().engine.has_tenants
    assert resolved.provenance["quota_redis"][0] == "(hidden)", "it may have a password"


def test_models_are_managed_by_one_api_process() -> None:
    assert resolve(manage_models=True).server.manage_models
    with pytest.raises(ConfigError, match=r"--manage-models .* works with one API process.* is 3"):
        resolve(manage_models=True, api_processes=3)


def test_defaults_of_the_server_are_its_own() -> None:
    assert resolve().server == ServerConfig(served_model_name="tiny")


@pytest.mark.parametrize(
    ("model", "folder", "name"),
    [
        (None, "/package/assets/small", "small"),
        ("models/tiny/", "models/tiny", "tiny"),
        ("org/tiny", "/cache/snapshots/abc", "org/tiny"),
    ],
)
def test_the_served_name_is_the_folder_or_the_hub_id(model: str | None, folder: str, name: str) -> None:
    assert resolve(model=model, folder=folder).server.served_model_name == name


@pytest.mark.parametrize("model", ["/models/tiny-Q8_0.gguf", "/models"])
def test_the_served_name_of_a_file_is_given(model: str) -> None:
    given = read_settings({"model": model})
    path = "/models/tiny-Q8_0.gguf"
    resolved = resolve_settings(given, whole(SMALL), machine(16), folder=path, local_name="tiny-Q8_0")
    assert resolved.server.served_model_name == "tiny-Q8_0"


def test_a_model_may_have_several_names() -> None:
    resolved = resolve(served_model_name="mine, yours,org/theirs")
    assert (resolved.server.served_model_name, resolved.server.aliases) == ("mine", ("yours", "org/theirs"))
    assert resolved.engine.name == "mine"
    assert resolve(folder="/models/a,b").server.served_model_name == "a,b"


@pytest.mark.parametrize("names", ["mine,", ",", "mine,mine", "mine, ,yours"])
def test_names_that_are_none(names: str) -> None:
    with pytest.raises(ConfigError, match=r"--served-model-name \(command line\) is .*different ones with commas"):
        resolve(served_model_name=names)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_dtype_follows_the_checkpoint(stored: str, dtype: str) -> None:
    resolved = resolve(replace(SMALL, checkpoint_dtype=stored))
    assert resolved.engine.dtype == dtype
    assert ("float16" in resolved.provenance["dtype"][1]) == (stored == "float16")


def test_more_sequences_where_logits_are_small() -> None:
    assert resolve(SMALL).engine.max_num_seqs == 256
    assert resolve(FULL).engine.max_num_seqs == 64


def test_the_step_has_room_for_every_running_sequence() -> None:
    assert resolve().engine.max_num_batched_tokens == 512
    assert resolve(max_num_seqs=1000).engine.max_num_batched_tokens == 1000


def test_the_context_is_the_models_where_the_pool_holds_it() -> None:
    resolved = resolve(FULL, gib=16)
    assert resolved.engine.max_model_len == 40_960
    assert resolved.provenance["max_model_len"][1] == "default: the model's own limit"


def test_the_context_shrinks_to_what_the_pool_holds() -> None:
    resolved = resolve(FULL, gib=6)
    length = resolved.engine.max_model_len
    assert 1024 < length < 40_960 and length % 16 == 0
    assert "of the model's 40960" in resolved.provenance["max_model_len"][1]
    assert resolved.memory.kv_tokens >= length
    given = resolve(FULL, kv_cache_memory="1GiB")
    assert given.engine.max_model_len == given.memory.kv_tokens == (GIB // (16 * 114_688) - 1) * 16


def test_windows_do_not_limit_the_context() -> None:
    assert resolve(WINDOWED, gib=6).engine.max_model_len == 32_768


@pytest.mark.parametrize("facts", [SMALL, FULL, MIXED, WINDOWED])
@pytest.mark.parametrize("gib", [2.5, 4, 8, 64])
def test_the_pool_decided_is_the_pool_sized(facts: ModelFacts, gib: float) -> None:
    resolved = resolve(facts, gib=gib)
    assert resolved.engine.kv_cache_bytes is not None
    assert resolved.memory.kv_bytes <= resolved.engine.kv_cache_bytes
    assert sum(row.bytes for row in resolved.memory.rows) == int(gib * GIB)
    assert resolved.memory.rows[-1].bytes >= 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": 4096}, ["--max-model-len (command line) is 4096", "2048"]),
        ({"max_num_batched_tokens": 8}, ["--max-num-batched-tokens", "256 sequences"]),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, ["600", "512"]),
        ({"threads": 5}, ["--threads", "5", "4"]),
        ({"quantization_group": 64}, ["--quantization-group (command line) is 64", "--quantization int4"]),
        ({"quantization": "int8", "quantization_group": 32}, ["--quantization (command line) is int8"]),
        ({"host": "0.0.0.0"}, ["--host", "--api-key", "--allow-insecure-bind"]),
        ({"host": "example.org"}, ["--host"]),
        (
            {"tenants": "t.yaml", "api_key": "x"},
            ["--tenants (command line)", "--api-key (command line)", "tenants add"],
        ),
        ({"audit": "on"}, ["--audit (command line)", "no --tenants; add it"]),
        ({"tenants": "t", "audit": "on", "state_dir": "none"}, ["--audit needs a file", "--audit-file"]),
    ],
)
def test_contradictions_are_refused_with_limit_and_remedy(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"host": "localhost"},
        {"host": "127.0.0.2"},
        {"host": "[::1]"},
        {"host": "0.0.0.0", "api_key": "k"},
        {"host": "0.0.0.0", "allow_insecure_bind": True},
    ],
)
def test_addresses_that_may_be_listened_on(flags: dict[str, Any]) -> None:
    assert resolve(**flags).server.host == flags["host"]


@pytest.mark.parametrize(("name", "value"), [("quantization", "int3"), ("quantization_group", 48)])
def test_what_no_kernel_multiplies_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* is .?{value}"):
        resolve(**{name: value})


def test_groups_of_a_file_or_the_environment() -> None:
    given = read_settings({}, {"PENSTOCK_QUANTIZATION": "int4", "PENSTOCK_QUANTIZATION_GROUP": "128"})
    resolved = resolve_settings(given, whole(SMALL), machine(16), folder="/models/tiny")
    assert (resolved.engine.quantization, resolved.engine.quantization_group) == ("int4", 128)
    assert resolved.provenance["quantization_group"] == (128, "environment variable PENSTOCK_QUANTIZATION_GROUP")


def test_quantised_weights_leave_room_for_a_longer_context() -> None:
    dense, quantised = resolve(FULL, gib=4), resolve(FULL, gib=4, quantization="int4")
    assert quantised.engine.max_model_len > dense.engine.max_model_len


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="a smaller model"):
        resolve(FULL, gib=1)
    with pytest.raises(DoesNotFit, match="--max-model-len"):
        resolve(FULL, gib=3, max_model_len=40_960)


def test_configuration_needs_no_torch() -> None:
    script = "import sys, penstock.config, penstock.families, penstock.weights.hub; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "huggingface_hub", "pydantic", "yaml", "numpy"} & set(loaded)


@pytest.mark.parametrize("method", ["ngram", "suffix", "off"])
def test_speculation_is_as_given(method: str) -> None:
    engine = resolve(speculation=method).engine
    assert (engine.speculation, engine.num_speculative_tokens) == (method, 0 if method == "off" else 31)


@pytest.mark.parametrize("given", [{}, {"speculation": "auto"}])
def test_speculation_is_on_where_drafts_can_be_verified(given: dict[str, Any]) -> None:
    engine = resolve(**given).engine
    assert (engine.speculation, engine.num_speculative_tokens, engine.max_step_drafts) == ("suffix", 31, 32)
    assert resolve(**given, tensor_parallel_size=2).engine.speculation == "suffix"
    stages = resolve(**given, pipeline_parallel_size=2)
    assert (stages.engine.speculation, stages.engine.max_step_drafts) == ("off", 0)
    assert "pipeline stages" in stages.provenance["speculation"][1]
    named = resolve(speculation="ngram", pipeline_parallel_size=2).engine
    assert (named.speculation, named.num_speculative_tokens, named.depth) == ("ngram", 31, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculation": "off", "num_speculative_tokens": 4}, ("--num-speculative-tokens", "4", "leave one")),
        ({"num_speculative_tokens": 4, "pipeline_parallel_size": 2}, ("--num-speculative-tokens", "off")),
    ],
)
def test_speculation_that_contradicts(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**given)
    assert all(word in str(caught.value) for word in words)


def test_no_drafts_of_a_model_that_gives_vectors() -> None:
    facts = replace(SMALL, pooling=PoolingFacts(task="embed", mode="last", width=64, encoder=False))
    resolved = resolve(facts)
    assert resolved.engine.speculation == "off" and "vectors" in resolved.provenance["speculation"][1]
    with pytest.raises(ConfigError, match=r"--speculation .* is ngram, .*vectors.* set --speculation auto or off"):
        resolve(facts, speculation="ngram")
