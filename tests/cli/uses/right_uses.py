"""For every command: lines that use each of its flags and arguments once, as a newcomer would.

They run in a folder that has `tiny`, a model; settings.yaml; marks.yaml; requests.jsonl; text.txt; cert.pem, keys and
key.pem; and with a hub that has acme/tiny. {url} is the address of a server, {log} its event log.
"""

from collections.abc import Mapping, Sequence

HUB_MODEL = "acme/tiny"
ONE_RANK = (
    "--config settings.yaml --generation-config none --device cpu --dtype bfloat16 --quantization int4 "
    "--quantization-group 64 --max-model-len 256 --max-num-seqs 4 --max-num-batched-tokens 128 --block-size 32 "
    "--kv-cache-memory 16MiB --kv-cache-dtype int8 --enable-prefix-caching --speculation suffix "
    "--num-speculative-tokens 5 --threads 1"
)
ENCODER = ONE_RANK.replace("int4", "int8").replace("--quantization-group 64 ", "").replace("tokens 128", "tokens 256")
RANKS = (
    "--tensor-parallel-size 2 --pipeline-parallel-size 1 --expert-parallel --distributed-executor process "
    "--no-enable-prefix-caching"
)
GPU = "--device cuda --gpu-memory-utilization 0.8 --deterministic"
SERVER = (
    "--host 127.0.0.1 --port 8197 --grpc-port 8198 --served-model-name ours,also-ours --api-key secret "
    "--tls-certificate cert.pem "
    "--tls-key key.pem --allow-insecure-bind --manage-models --truncate-embeddings --wires openai,kserve "
    "--seed 7 --max-waiting 64 --max-waiting-tokens 9000 "
    "--max-in-flight 128 --max-body-size 1MiB --max-answer-size 4MiB --max-prompts 8 --max-choices 4 --max-sequences 9 "
    "--max-logprobs 5 --max-stop-strings 4 --max-priority 3 --tool-format hermes --reasoning-format think "
    "--thinking-budget 100 --drain-timeout 5 --shutdown-delay 0.5 --step-deadline 60 --log-format json "
    "--log-level warning --access-log 0.1 --vllm-metrics --no-vllm-metrics --trusted-proxy 127.0.0.1 "
    "--api-key-file keys "
    "--event-log events.jsonl --state-dir none --cors-origin https://ours.example --request-timeout 60 "
    "--first-token-timeout 30 --target-itl 50 --admin-key operator --allowed-host localhost --sleep-after 600"
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
    "plan tiny --tensor-parallel-size 2",
    "plan tiny --watermark gumbel --watermark-key 0123456789abcdef0123456789abcdef",
    "plan tiny --api-processes 2",
    "plan tiny --otlp-endpoint http://127.0.0.1:4318",
)
MODELS: Sequence[str] = (  # in this order
    "models",
    "models --json",
    "models --markdown",
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
)
FAILING: Sequence[str] = (  # with status 1: random weights are a problem, and the text has no mark
    f"verify {HUB} --json findings.json {ONE_RANK}",
    "detect text.txt --model tiny --watermark green-list --config marks.yaml --json marks.json",
)
SERVERS: Sequence[str] = (f"serve {HUB} {ONE_RANK} {SERVER}", f"serve --model tiny {RANKS} --port 8198")
WITH_SERVER: Sequence[str] = (
    "bench serve --url {url} --model ours --api-key secret --num-prompts 4 --input-len 8-16 --output-len 4 "
    "--shared-prefix 8 --vocab-size 300 --request-rate 100 --burstiness 0.5 --concurrency 2 "
    "--slo ttft=5,tpot=1,e2e=10 --seed 3 --json load.json",
    "top {url} --once --interval 0.5 --api-key secret",
    "reload {url} --admin-key operator --drain-first",
    "sleep {url} --admin-key operator",
    "wake {url} --admin-key operator",
)
OTHERS: Sequence[str] = ("completion bash", "completion zsh", "completion fish", "replay {log}")

LINES = (*PLANS, *MODELS, *ENGINES, *FAILING, *SERVERS, *WITH_SERVER, *OTHERS)

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
    | {"--api-processes", "--no-expert-parallel", "--otlp-endpoint", "--watermark", "--watermark-key"},
    "embed": GPU_ONLY | OF_RANKS | {"--quantization-group", "--revision"},  # encoders have no int4
}
