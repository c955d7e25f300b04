"""For every command: lines that use each of its flags and arguments once, as a newcomer would.

They run in a folder that has `tiny`, a model; `repository` with the models `ours` and `ranks`; settings.yaml;
marks.yaml; prices.yaml; providers.yaml; tenants.yaml; requests.jsonl; labels.jsonl; text.txt; cert.pem, key.pem and
authority.pem; keys and audit.key; and with a hub that has acme/tiny. {url} is the address of a server, {port} its port,
{log} its event log, {ledger} its ledger, {engine} the address of an engine.
"""

from collections.abc import Mapping, Sequence

HUB_MODEL = "acme/tiny"
ONE_RANK = (
    "--config settings.yaml --generation-config none --device cpu --dtype bfloat16 --quantization int4 "
    "--quantization-group 64 --max-model-len 256 --max-num-seqs 4 --max-num-batched-tokens 128 --block-size 32 "
    "--kv-cache-memory 16MiB --kv-cache-dtype int8 --enable-prefix-caching --speculation suffix "
    "--num-speculative-tokens 5 --threads 1"
)
ENCODER = (
    ONE_RANK.replace("int4", "int8")
    .replace("suffix --num-speculative-tokens 5", "off")
    .replace("--quantization-group 64 ", "")
    .replace("tokens 128", "tokens 256")
)
RANKS = (
    "--tensor-parallel-size 2 --pipeline-parallel-size 1 --expert-parallel --distributed-executor process "
    "--no-enable-prefix-caching"
)
GPU = "--device cuda --gpu-memory-utilization 0.8 --deterministic"
SERVER = (
    "--host 127.0.0.1 --port 8197 --grpc-port 8198 --served-model-name ours,also-ours --api-key secret "
    "--tls-certificate cert.pem "
    "--tls-key key.pem --allow-insecure-bind --manage-models --truncate-embeddings --wires openai,kserve "
    "--context-policy drop-oldest "
    "--seed 7 --max-waiting 64 --max-waiting-tokens 9000 "
    "--max-in-flight 128 --max-body-size 1MiB --max-answer-size 4MiB --max-prompts 8 --max-choices 4 --max-sequences 9 "
    "--max-logprobs 5 --max-stop-strings 4 --max-priority 3 --tool-format hermes --reasoning-format think "
    "--thinking-budget 100 --drain-timeout 5 --shutdown-delay 0.5 --step-deadline 60 --log-format json "
    "--log-level debug --access-log 0.1 --vllm-metrics --no-vllm-metrics --trusted-proxy 127.0.0.1 "
    "--api-key-file keys "
    "--event-log events.jsonl --state-dir none --cors-origin https://ours.example "
    "--request-timeout 60 --first-token-timeout 30 --target-itl 50 --admin-key operator --allowed-host localhost "
    "--sleep-after 600"
)
FLEET = "--fleet-key secret --fleet-ca authority.pem"
TENANTS = (
    "--tenants tenants.yaml --ledger-days 30 --request-log requests.log --request-log-share 0.5 "
    "--audit required --audit-file audit.jsonl "
    "--audit-heads heads.jsonl --audit-key-file audit.key"
)
HOST = (  # of an engine alone
    "--served-model-name ours --fleet-key secret --allow-insecure-bind --tls-certificate cert.pem --tls-key key.pem "
    "--fleet-ca authority.pem "
    "--max-waiting 64 --max-waiting-tokens 9000 --target-itl 50 --step-deadline 60 --drain-timeout 5 --log-format text "
    "--log-level info --access-log 0.1 --vllm-metrics --no-vllm-metrics --event-log engine.jsonl --kv-disk kv,1GiB "
    "--preemption-notice preempted"
)
SAMPLING = (
    "--temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --top-n-sigma 2 --repetition-penalty 1.1 "
    "--presence-penalty 0.2 --frequency-penalty 0.1 --seed 7 --max-tokens 8"
)
HUB = f"{HUB_MODEL} --revision main"

PLANS: Sequence[str] = (  # no weights are loaded, so they are cheap
    f"plan tiny {ONE_RANK} {SERVER} --no-deterministic --no-enforce-eager --no-expert-parallel --json plan.json",
    f"plan --model tiny {RANKS}",
    f"plan tiny --hardware 2xH100 --link 25GB/s {GPU} --no-enforce-eager",
    "plan tiny --hardware 1xH100 --device cuda --enforce-eager",
    "plan tiny --hardware 1xH100 --kv-host 1GiB",
    "plan tiny --tensor-parallel-size 2",
    "plan tiny --watermark gumbel --watermark-key 0123456789abcdef0123456789abcdef",
    "plan tiny --api-processes 2",
    "plan tiny --providers providers.yaml",
    "plan tiny --kv-disk kv,1GiB,7",
    "plan tiny --otlp-endpoint http://127.0.0.1:4318",
    f"plan tiny {TENANTS} --quota-redis redis://127.0.0.1:6379",
    "plan tiny --repository repository --repository-cache 1GiB --load-model ours --client-shared-memory 1MiB "
    "--max-loaded 2 --min-stay 5 --rate-limit-resource memory:4",
    f"plan tiny --engines 127.0.0.1:9000 {FLEET} --region north --route round-robin --move-anywhere",
    "plan tiny --replicas 2 --prefill-replicas 1",
    "plan tiny --replicas 0:1 --scale-down-after 60 --hold-timeout 120 --preemption-notice /run/preempted",
)
MODELS: Sequence[str] = (  # in this order
    "models",
    "models --json",
    f"pull {HUB}",
    "list",
    "list --json",
    "show",
    f"show {HUB}",
    "show tiny --json",
    "show tiny --template",
    f"manifest {HUB}",
    f"manifest {HUB} --check",
    f"plan {HUB}",
    f"rm {HUB} --yes",
)
SIMULATIONS: Sequence[str] = (
    "simulate --list",
    "simulate batching --show",
    "simulate batching --seed 3 --duration 2 --prices prices.yaml --json batching.json --html batching.html",
    "plan fleet --model llama-3.1-8b --rate 3 --prompt 500 --output 200 --cached 0.1 --ttft 1 --tpot 0.1 --share 0.9 "
    "--device L4 --prices prices.yaml --simulated 1 --json fleet.json",
)
KEYS: Sequence[str] = (  # in this order
    "tenants add teams.yaml search --key ci --expires-in 30 --model ours --wire openai --admin",
    "tenants rotate teams.yaml search --key ci --keep-days 2",
    "tenants list teams.yaml",
    "tenants check teams.yaml",
)
ROUTES: Sequence[str] = (  # in this order
    "route fit labels.jsonl --out route.json",
    "route evaluate labels.jsonl --classifier route.json",
)
ENGINES: Sequence[str] = (
    f"run {HUB} Hello there {ONE_RANK} {SAMPLING} --stats --no-history",
    f"embed all-minilm-l6-v2 Hello {ENCODER}",
    "run --model tiny Hello --max-model-len 128 --threads 1 --system Brief. --max-tokens 4 --history",
    "run tiny Hello --max-model-len 128 --threads 1 --raw --max-tokens 4",
    f"batch requests.jsonl answers.jsonl --model {HUB} {ONE_RANK}",
    f"bench throughput {HUB} --cases 2x16/8 --runs 1 --json throughput.json {ONE_RANK}",
    f"bench latency {HUB} --cases 1x16/8 --runs 1 --json latency.json {ONE_RANK}",
    f"bench quality {HUB} text.txt --windows 2 --window-tokens 32 --dense --tokens-out ids.json --json q {ONE_RANK}",
    "bench quality tiny --tokens-in ids.json --no-dense --quantization int8 --max-model-len 64 --threads 1",
    "quantize tiny smaller --scheme int4 --group 16 --zero-points --format compressed-tensors --method rtn "
    "--calibration text.txt --windows 2 --keep *.o_proj --no-table --threads 1 --json smaller.json",
    "quantize tiny int8 --scheme int8 --group 16 --windows 4 --table --threads 1",
    "bench quality smaller text.txt --against tiny --windows 2 --window-tokens 32 --threads 1 --json against.json",
)
FAILING: Sequence[str] = (  # with status 1: random weights are a problem, and the text has no mark
    f"verify {HUB} --json findings.json {ONE_RANK}",
    "detect text.txt --model tiny --watermark green-list --config marks.yaml --json marks.json",
)
SERVERS: Sequence[str] = (f"serve {HUB} {ONE_RANK} {SERVER}", f"serve --model tiny {RANKS} --port 8198")
SHARED_SERVER = f"serve tiny {TENANTS} --kv-disk kv,1GiB,7"
OF_TENANTS: Sequence[str] = (
    "ledger summary --port {port} --by tenant,day --since 2026-01-01 --until 2099-12-31 --tenant search --json",
    "ledger summary --ledger {ledger}",
    "ledger export --port {port} --format jsonl --since 2026-01-01 --until 2099-12-31 --tenant search",
    "ledger export --ledger {ledger}",
    "logs --port {port} --tenant search --slow 0 --last 5 --json",
    "logs --ledger {ledger} --errors",
    "audit verify audit.jsonl --heads heads.jsonl --key-file audit.key --ledger {ledger}",
)
REPOSITORY_SERVER = (
    "serve --repository repository --repository-cache 1GiB --load-model ours --load-model ranks --max-loaded 2 "
    "--min-stay 5 --rate-limit-resource a:4 --state-dir none --client-shared-memory 1MiB --providers providers.yaml"
)
OF_REPOSITORY: Sequence[str] = (
    "repository --url {url}",
    "repository status --url {url}",
    "repository unload ours --url {url} --key secret --dependents",
    "repository load ours --url {url}",
    "bench serve --url {url} --wire kserve --model ranks --num-prompts 4 --concurrency 2",
    "ps {url} --key secret",
    "stop ours --url {url} --key secret",
    "rollout start ranks --candidate 2 --plan shadow,50,100 --hold 1 --patience 60 --judge errors=0.1 --url {url}",
    "rollout pause ranks --url {url} --key secret",
    "rollout status --url {url}",
)
REPLICATED_SERVER = "serve tiny --replicas 1:2 --scale-down-after 60 --hold-timeout 120 --preemption-notice preempted"
SCALED = (  # tests/cluster/test_kubernetes.py runs it
    "fleet scale 127.0.0.1:1 --on kubernetes:default/deployment/engines --replicas 2 --servers http://127.0.0.1:1 "
    "--threads 1 --window 60 --idle 60 --standby 1 --kubernetes-api {api} --fleet-key secret"
)
ENGINE_HOST = f"engine {HUB} {ONE_RANK} {HOST} --listen 127.0.0.1:0 --role both --page-port 0 --region north"
FRONT = f"serve --engines {{engine}} {FLEET} --region north --route round-robin --move-anywhere"
SIMULATOR = "simulate batching --serve --host 127.0.0.1 --port 0"  # tests/cli/simulate/test_live.py runs it
OF_FLEET: Sequence[str] = (f"fleet status {{engine}} {FLEET}", f"fleet drain {{engine}} --grace 1 {FLEET}")
WITH_SERVER: Sequence[str] = (
    "bench serve --url {url} --model ours --api-key secret --num-prompts 4 --input-len 8-16 --output-len 40 "
    "--shared-prefix 8 --vocab-size 300 --request-rate 100 --burstiness 0.5 --concurrency 2 "
    "--slo ttft=5,tpot=1,e2e=10 --seed 3 --json load.json",
    "top {url} --once --interval 0.5 --api-key secret",
    "sleep {url} --admin-key operator",  # ends the log, which the next start of the engine begins anew
    "simulate --fit {log} --json costs.json",
    "simulate --fit {log} --fit {log} --json costs.json",
    "wake {url} --admin-key operator",
    "reload {url} --admin-key operator --drain-first",
)
OTHERS: Sequence[str] = (
    "completion bash",
    "completion zsh",
    "completion fish",
    "replay {log}",
    "simulate mooncake --trace {log} --duration 1",
)

LINES = (
    *(*PLANS, *SIMULATIONS, *MODELS, *KEYS, *ROUTES, *ENGINES, *FAILING, *SERVERS, *WITH_SERVER, *OTHERS),
    *(
        SHARED_SERVER,
        *OF_TENANTS,
        REPOSITORY_SERVER,
        *OF_REPOSITORY,
        REPLICATED_SERVER,
        ENGINE_HOST,
        FRONT,
        *OF_FLEET,
        SCALED,
        SIMULATOR,
    ),
)

# Flags that a command shares with `plan` and `serve`, which use them above.
GPU_ONLY = {
    "--gpu-memory-utilization",
    "--enforce-eager",
    "--no-enforce-eager",
    "--deterministic",
    "--no-deterministic",
}
OF_RANKS = {
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--expert-parallel",
    "--no-expert-parallel",
    "--distributed-executor",
    "--no-enable-prefix-caching",
}
ELSEWHERE: Mapping[str, set[str]] = {
    "plan": set(),
    "serve": GPU_ONLY
    | {
        "--api-processes",
        "--kv-host",
        "--prefill-replicas",
        "--no-expert-parallel",
        "--otlp-endpoint",
        "--quota-redis",
        "--watermark",
        "--watermark-key",
    },
    "engine": GPU_ONLY | OF_RANKS | {"--kv-host", "--otlp-endpoint", "--watermark", "--watermark-key"},
    "fleet scale": {"--run", "--fleet-ca"},  # tests/ray_cluster; as of the other commands of fleet
    "embed": GPU_ONLY
    | OF_RANKS
    | {"--quantization-group", "--revision", "--num-speculative-tokens"},  # no int4, no guesses
}
