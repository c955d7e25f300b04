"""The settings of a server.

These are derived from the tables: the flags and their help, the environment variables, the keys of a configuration
file, the checks of values, constant defaults with their reasons, the settings in `penstock plan`, and the table in
docs/configuration.md.

To add a setting:

1. Add a `Setting` to `SERVER`, or to `ENGINE` if commands without a server have it, too.
2. Add a field of its name to the struct that holds its value: `ServerConfig`, or `ServerLimits` if requests are checked
   against it (both in config/server.py), or `EngineConfig` (config/engine.py). Its default is `DEFAULTS["name"]`.

`python scripts/document_tables.py` then writes its row in docs/configuration.md.

A default that depends on the model or the machine is computed in config/defaults.py. Values that are not simply of
their kind are read in config/settings.py. config/resolve.py checks how settings fit together.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.declared.setting import COUNT, ONE_WAY, RANKS, SECONDS, SIZE, SWITCH, Kind, Setting, choice, text, whole

WIRE_NAMES = ("openai", "anthropic", "ollama", "tgi", "kserve", "rerank", "pages")
MODEL = Setting(
    "model",
    text("MODEL", 0),
    "A [name](models.md#names): of `penstock list`, a folder, a GGUF file, or a hub id such as `org/name` or "
    "`org/name:Q4_K_M`",
    words="`smollm2-135m` if its package is installed, else `python-8m`",
    more="On the command line, also without `--model`",
)

# The keys are the headings in --help.
# fmt: off
ENGINE: Mapping[str, tuple[Setting, ...]] = MappingProxyType({
    "Model": (
        Setting("revision", text("NAME"), "Branch, tag or commit of a Hugging Face model", "",
                "the hub's main branch, or the folder as it is", words="the hub's main branch"),
        Setting("generation_config", choice("model", "none"), "Whose sampling values hold for requests that set none",
                "model", "the values that the model recommends"),
        Setting("device", choice("auto", "cpu", "cuda"), "Device that computes", words="`auto`, a GPU if there is one"),
        Setting("dtype", choice("auto", "float32", "bfloat16"), "Dtype of weights, activations and KV cache",
                words="`auto`, the checkpoint's if it is one of these, else `bfloat16`"),
        Setting("quantization", choice("none", "int8", "int4", "fp8"),
                "Quantise the weights while loading, fp8 only on a GPU", "none", "weights in the dtype lose nothing"),
        Setting("quantization_group", choice("32", "64", "128")._replace(metavar="N"),
                "Values that share a scale in int4", 32, "the smallest: in int4, quality comes from small groups"),
    ),
    "Memory and batches": (
        Setting("max_model_len", COUNT, "Most tokens of a prompt and its output together",
                words="the model's limit, if memory allows"),
        Setting("max_num_seqs", COUNT, "Most sequences that run at a time",
                words="64 to 256, by the vocabulary's size"),
        Setting("max_num_batched_tokens", COUNT, "Most tokens in one step; longer prompts are prefilled in chunks",
                words="512, on a GPU 2048"),
        Setting("kv_cache_memory", SIZE, "Memory for the KV cache of each rank: 4GiB, 500MB",
                words="a share of the free memory"),
        Setting("kv_cache_dtype", choice("auto", "int8", "fp8"),
                "Dtype of the KV cache, int8 on a CPU or fp8 on a GPU for half the size", "auto",
                "keys and values in the dtype lose nothing", words="`auto`, as --dtype"),
        Setting("gpu_memory_utilization", Kind("number", "SHARE", above=0, most=1),
                "Share of a GPU's memory that the engine may use", 0.9,
                "the rest is for what CUDA and other programs take beside it"),
        Setting("enable_prefix_caching", SWITCH, "Reuse the KV cache of equal prefixes", words="on"),
        Setting("block_size", whole(1, 1024), "Tokens in a KV block", 16,
                "small blocks waste little at a sequence's end"),
    ),
    "Execution": (
        Setting("threads", COUNT, "CPU: threads that compute, for each rank",
                words="all cores, divided among the ranks"),
        Setting("speculation", choice("auto", "off", "ngram", "suffix"),
                "Source of the guessed tokens that a step verifies, ngram for the request, suffix also for recent "
                "outputs of the same tenant", words="`auto`, `suffix` on a CPU with one pipeline stage, else `off`",
                more="[speculation.md](speculation.md)"),
        Setting("num_speculative_tokens", whole(1, 64), "Most guessed tokens of a sequence in a step",
                words="31 with speculation"),
        Setting("enforce_eager", SWITCH, "GPU: do not capture CUDA graphs", False,
                "CUDA graphs save the launches of a step"),
        Setting("deterministic", SWITCH,
                "GPU: tokens do not depend on the other requests in the batch; slower. A CPU's never do", False,
                "on a GPU the fast path; on a CPU tokens never depend on the batch"),
        Setting("tensor_parallel_size", RANKS, "Ranks that each layer is split over", 1, "layers are not divided"),
        Setting("pipeline_parallel_size", RANKS, "Stages that the layers are divided into", 1, "layers stay together"),
        Setting("expert_parallel", SWITCH, "Give each tensor rank whole experts", False,
                "each tensor rank has a part of every expert, so that all have equal work"),
        Setting("distributed_executor", choice("auto", "process", "ray"), "How ranks are started", "auto",
                "ranks are processes of this machine", words="`auto`, processes on this machine"),
    ),
})
SERVER: Mapping[str, tuple[Setting, ...]] = MappingProxyType({
    "Model": (
        Setting("served_model_name", text("NAME,..."), "The model's name in the API, and aliases of it",
                words="the model's own name", more="With commas between them"),
    ),
    "Server": (
        Setting("host", text("ADDRESS"), "Address to listen on", "127.0.0.1", "reachable from this machine only"),
        Setting("port", whole(0, 65535), "Port to listen on; 0 takes a free one", 8000,
                "what clients of such servers expect"),
        Setting("api_processes", whole(1, 64), "Processes that speak HTTP; more for thousands of streams", 1,
                "enough for about a thousand streams",
                more="Each has a share of the connections ([when](serving.md#several-api-processes))"),
        Setting("grpc_port", whole(0, 65535), "Port of KServe's gRPC service; 0 takes a free one", None, "HTTP only",
                words="HTTP only", more="[kserve.md](kserve.md#grpc)"),
        Setting("wires", text("NAMES"), f"APIs to speak, with commas between them: {', '.join(WIRE_NAMES)}",
                ",".join(WIRE_NAMES), "every client finds its own", words="all",
                more="[OpenAI's](openai.md), [Anthropic's](anthropic.md), [Ollama's](ollama.md), [TGI's](tgi.md), "
                "[KServe's](kserve.md), [rerank, score and classify](embeddings.md), and pages for browsers"),
        Setting("state_dir", text("DIR"), "Folder for stored responses, files and batches, or none", "auto",
                "penstock/port-N in the user's folder for state", words="`~/.local/state/penstock/port-PORT`",
                more="Of [responses](responses.md), and of [files and batches](batch.md#on-a-server). With `none`, "
                "nothing is stored"),
        Setting("repository", text("DIR"), "Folder of models to serve, of any kind, also beside MODEL, or s3://BUCKET",
                "", "one model is served", words="none", more="[repository.md](repository.md)"),
        Setting("repository_cache", SIZE, "Most bytes on disk of files from a bucket", 20 << 30,
                "a few small language models", words="20 GiB",
                more="[repository.md](repository.md#models-in-a-bucket)"),
        Setting("providers", text("FILE"), "YAML file with models of providers, beside MODEL or alone", "",
                "all models are here", words="none", more="[gateway.md](gateway.md)"),
        Setting("load_model", Kind("list", "NAME"), "Model of the repository to load at the start, or none; repeatable",
                (), "all that the folder has", words="all", more="In a file or a variable, with commas between them"),
        Setting("rate_limit_resource", Kind("list", "NAME:COUNT"), "Units of a resource that models of the repository "
                "share; repeatable", (), "as many as the model needs that needs the most",
                words="as many as one batch needs", more="[repository.md](repository.md#resources)"),
        Setting("client_shared_memory", SIZE, "Most bytes of shared memory in which clients on this machine may pass "
                "tensors to models of the repository", None, "tensors are sent", words="off",
                more="[repository.md](repository.md#shared-memory-of-clients)"),
        Setting("max_loaded", COUNT, "Load language models of the repository on demand, at most so many at once", None,
                "all are loaded at the start", words="all", more="[many-models.md](many-models.md#coming-and-going)"),
        Setting("min_stay", SECONDS, "Seconds that such a model stays loaded at least, before another takes its room",
                10.0, "a few times what a small model takes to load"),
        Setting("manage_models", ONE_WAY, "Let clients of Ollama's API download and delete models", False,
                "clients change nothing on this machine", more="[ollama.md](ollama.md)"),
    ),
    "Fleet": (
        Setting("replicas", text("N|MIN:MAX"),
                "Engines on this machine, with MIN:MAX as many as the load needs; each has a part of cores and memory",
                "1", "one engine uses the whole machine", more="[fleet.md](fleet.md)"),
        Setting("scale_down_after", SECONDS, "With MIN:MAX, seconds for which fewer engines must have been enough",
                300.0, "to start an engine again costs more than to keep it", more="[autoscaling.md](autoscaling.md)"),
        Setting("hold_timeout", SECONDS, "Seconds that a request waits while no engine of the fleet can take it", 60.0,
                "an engine that ends is back sooner"),
        Setting("engines", text("ENGINES"), "Engines elsewhere: HOST:PORT,... or file:PATH or dns:NAME:PORT", "",
                "the server has an engine of its own", words="none", more="[fleet.md](fleet.md#engines-elsewhere)"),
        Setting("prefill_replicas", whole(0, 64), "With --replicas N, so many of these compute prompts for the others",
                0, "each computes its own prompts", words="none", more="[disaggregation.md](disaggregation.md)"),
        Setting("region", text("NAME"), "Name of the region of this machine; tenants may be bound to some",
                "", "it has no name", words="none", more="[fleet.md](fleet.md#regions)"),
        Setting("route", choice("cost", "round-robin"), "How the engine of a request is chosen", "cost",
                "the least time until its first token, what is cached included"),
        Setting("move_anywhere", ONE_WAY, "Let a request go on with other weights or numerics, if no other is left",
                False, "it goes on only where its tokens stay the same",
                more="[fleet.md](fleet.md#what-exact-means)"),
        Setting("fleet_key", text("KEY"), "Key between fronts and engines. Better set PENSTOCK_FLEET_KEY", "",
                "none is required on loopback", words="none on loopback", secret=True),
        Setting("fleet_ca", text("FILE"), "Certificates in PEM that engines' certificates must come from: use TLS", "",
                "connections to engines are not encrypted", words="no TLS"),
    ),
    "Options": (
        Setting("seed", whole(0, 2**64 - 1), "Seed for requests without one", None, "each request draws its own",
                words="a random one for each"),
    ),
    "Access": (
        Setting("api_key", text("KEY"), "Key that clients must send. Better set PENSTOCK_API_KEY", None,
                "no key is required", secret=True),
        Setting("api_key_file", text("FILE"), "File of more keys, read again at SIGHUP: KEY or NAME KEY a line",
                "", "there is at most the key of --api-key", words="none", more="[keys](operations.md#api-keys)"),
        Setting("admin_key", text("KEY"), "Key of penstock reload, sleep and wake. Better set PENSTOCK_ADMIN_KEY", None,
                "on loopback without an API key none is required; else there are no such routes",
                more="Without it, [these](operations.md#reload) need none on loopback if there is no API key, and are "
                "off otherwise", secret=True),
        Setting("allowed_host", Kind("list", "NAME"), "Name of this server in the Host header; repeatable", (),
                "on loopback without an API key only loopback's names; else any",
                words="any name; on loopback without a key only loopback's",
                more="In a file or a variable, with commas between them. A request with another name in its `Host` "
                "header is refused"),
        Setting("trusted_proxy", Kind("list", "ADDRESS"),
                "Proxy whose X-Forwarded-For names the client in the log; repeatable", (),
                "the log shows the other end of the connection", words="none",
                more="An address or a network such as `10.0.0.0/8`. In a file or a variable, with commas between them"),
        Setting("allow_insecure_bind", ONE_WAY, "Allow other addresses than loopback without an API key", False,
                "other machines need a key"),
        Setting("tls_certificate", text("FILE"), "Certificate and its chain in PEM: serve HTTPS, and no HTTP", "",
                "HTTP without TLS", more="[serving.md](serving.md#tls)"),
        Setting("tls_key", text("FILE"), "The certificate's key in PEM", "",
                "the key is in the certificate's file, if there is one", words="in the same file"),
        Setting("cors_origin", Kind("list", "ORIGIN"), "Web origin whose pages may use the server; repeatable", (),
                "only pages of the server itself may use it", words="none",
                more="In a file or a variable, with commas between them"),
    ),
    "Tenants": (
        Setting("tenants", text("FILE"),
                "File of teams that share the server, read again at SIGHUP: keys, shares, limits, prices", "",
                "requests are not told apart", words="none", more="[tenants.md](tenants.md)"),
        Setting("quota_redis", text("URL"), "Redis in which several servers count what tenants use", "",
                "this server counts by itself", words="none", secret=True,
                more="[tenants.md](tenants.md#several-servers)"),
        Setting("ledger_days", whole(1, 36500), "Days for which the ledger keeps the requests of tenants", 400,
                "a year, and time to look at it", more="[ledger.md](ledger.md)"),
        Setting("request_log", text("FILE"), "File with a JSON line for each request, rotated at 64 MiB", "",
                "the ledger has the same", words="none", more="[ledger.md](ledger.md#the-request-log)"),
        Setting("request_log_share", Kind("number", "SHARE", least=0, most=1),
                "Share of the requests without an error that --request-log has", 1.0, "all are there"),
        Setting("audit", choice("none", "on", "required"),
                "Log who was let in; required refuses requests while that cannot be written", "none",
                "nothing is logged beside the log itself", more="[audit.md](audit.md)"),
        Setting("audit_file", text("FILE"), "File of the audit log", "", "audit.jsonl in --state-dir",
                words="`audit.jsonl` in `state-dir`"),
        Setting("audit_heads", text("FILE"), "File of its signed heads, best on another machine's disk", "",
                "no heads are written", words="none"),
        Setting("audit_key_file", text("FILE"), "File of the secret that signs heads, read at the start", "",
                "heads are not signed", words="none"),
    ),
    "Answers": (
        Setting("tool_format", choice("auto", "none", "deepseek-v3", "deepseek-v3.1", "glm", "harmony", "hermes",
                                      "json", "kimi-k2", "lfm2", "llama3-json", "minimax", "mistral", "mistral-list",
                                      "nemotron", "pythonic", "qwen3-coder", "seed-oss"),
                "Format of tool calls (docs/tools.md), or none", "auto", "as the chat template shows it",
                more="[tools.md](tools.md#formats)"),
        Setting("reasoning_format", choice("auto", "none", "harmony", "mistral", "seed", "think"),
                "Format of reasoning (docs/tools.md)", "auto", "as the chat template shows it"),
        Setting("thinking_budget", whole(0), "Most tokens of reasoning in an answer; requests may ask for less", None,
                "models think as long as max_tokens allows", more="[tools.md](tools.md#thinking-budget)"),
        Setting("watermark", choice("none", "green-list", "gumbel"), "Mark outputs, on a CPU (docs/watermarking.md)",
                "none", "outputs are what the model gives", more="[watermarking.md](watermarking.md)"),
        Setting("watermark_key", text("KEY", 16, 1024),
                "Secret of the watermark, 16 to 1024 characters. Better set PENSTOCK_WATERMARK_KEY", "",
                "nothing is marked", secret=True),
    ),
    "Queue and deadlines": (
        Setting("max_in_flight", COUNT, "Most requests in flight; the next ones get 429", 2048,
                "bounds memory and open sockets"),
        Setting("max_waiting", COUNT, "Most requests that wait; the next ones get 429", 1024,
                "a longer queue would only time out"),
        Setting("max_waiting_tokens", COUNT, "Most prompt tokens of waiting requests; more get 429", 1 << 20,
                "a thousand tokens for each request that may wait"),
        Setting("max_priority", whole(0, 86400), "Requests' priorities are from -N to N seconds", 10,
                "seconds: the others wait at most twice as much longer", more="[the queue](serving.md#the-queue)"),
        Setting("request_timeout", SECONDS, "Longest time of a request, to its last token", None,
                "a request may take as long as it needs", words="no limit", more="[deadlines](serving.md#deadlines)"),
        Setting("first_token_timeout", SECONDS, "Longest time until a request's first token", None,
                "a request may wait as long as it needs", words="no limit"),
        Setting("target_itl", Kind("number", "MS", least=0, most=60000),
                "Target for the milliseconds between tokens, by smaller prompt chunks", 0.0,
                "prompts are cut to --max-num-batched-tokens only", words="0, none",
                more="[pace](serving.md#the-pace-of-streams)"),
        Setting("step_deadline", SECONDS, "Seconds without a step until a busy engine counts as hung", 120.0,
                "no step of a healthy engine takes as long"),
        Setting("shutdown_delay", Kind("number", "SECONDS", least=0, most=86_400),
                "Seconds to serve on after SIGTERM while /readyz answers 503, so that load balancers notice", 0.0,
                "requests are refused from the signal on", more="[signals](serving.md#signals-and-failures)"),
        Setting("drain_timeout", SECONDS, "Seconds for requests in flight to finish at shutdown", 30.0,
                "as long as orchestrators wait before they kill"),
        Setting("preemption_notice", text("FILE|URL"),
                "A file or page by which the cloud says that it takes this machine away; then as at SIGTERM", "",
                "only SIGTERM says so", words="none", more="[fleet.md](fleet.md)"),
        Setting("kv_disk", text("DIR,SIZE"),
                "Keep KV blocks also in this folder, up to this size: contexts return after eviction and restarts", "",
                "they hold what users sent", words="none", more="[kv-tiers.md](kv-tiers.md)"),
        Setting("kv_host", SIZE, "GPU: keep evicted KV blocks in so much of the host's memory", None,
                "the host's memory is for other programs", words="none", more="[kv-tiers.md](kv-tiers.md#on-a-gpu)"),
        Setting("sleep_after", SECONDS, "End the engine after so long without a request, until the next", None,
                "the engine stays loaded", words="never", more="[sleep](operations.md#sleep)"),
    ),
    "Limits of a request": (
        Setting("max_body_size", SIZE, "Largest body of a request", 4 << 20, "a prompt of a million tokens"),
        Setting("max_answer_size", SIZE, "Largest answer that a request may ask for", 32 << 20,
                "4 million tokens, or 330,000 log-probabilities", more="[how it is estimated](limits.md#answers)"),
        Setting("max_prompts", COUNT, "Most prompts in a completions request", 64, "a batch of an evaluation harness"),
        Setting("max_choices", COUNT, "Most choices (n) of a request", 32, "more are better sent as requests"),
        Setting("max_sequences", COUNT, "Most prompts times choices of a request", 256,
                "what one request may take of the queue"),
        Setting("context_policy", choice("error", "drop-oldest", "summarise:MODEL"),
                "What becomes of a chat that is too long", "error", "clients know best what to leave out",
                more="[limits.md](limits.md#a-chat-that-is-too-long)"),
        Setting("truncate_embeddings", ONE_WAY,
                "Cut texts for embeddings, scores and labels that are too long for the model", False,
                "OpenAI's API refuses them; a cut text's vector says nothing about its end",
                more="[embeddings.md](embeddings.md#texts-that-are-too-long)"),
        Setting("max_logprobs", whole(0, 1000), "Most alternatives per token in logprobs", 20, "as in the OpenAI API"),
        Setting("max_stop_strings", COUNT, "Most stop strings of a request", 16,
                "each is searched for in every token's text"),
    ),
    "Logs and traces": (
        Setting("log_format", choice("text", "json"), "Format of log lines, json for log collectors", "text",
                "for people", more="[monitoring.md](monitoring.md#logs)"),
        Setting("log_level", choice("debug", "info", "warning", "error"), "Least level of log lines", "info",
                "starts, ends and requests are shown"),
        Setting("access_log", Kind("number", "SHARE", least=0, most=1),
                "Share of answered requests in the log, 0 for none; those with an error status are always there",
                1.0, "each request has its line", words="1, all"),
        Setting("vllm_metrics", SWITCH, "Show metrics also under vLLM's names", True,
                "dashboards and routers made for vLLM find theirs", words="on"),
        Setting("otlp_endpoint", text("URL"), "Send a trace of each request to this OpenTelemetry collector, over HTTP",
                "", "no traces are sent", more="[monitoring.md](monitoring.md#traces)"),
        Setting("event_log", text("FILE"), "Write the scheduler's events, with token ids, for penstock replay", "",
                "no events are written"),
    ),
})
# fmt: on

SETTINGS: Mapping[str, Setting] = {
    each.name: each for each in (MODEL, *(row for table in (ENGINE, SERVER) for rows in table.values() for row in rows))
}
# The constant defaults: config/defaults.py computes the others.
DEFAULTS: Mapping[str, Any] = MappingProxyType({name: each.default for name, each in SETTINGS.items() if each.why})
