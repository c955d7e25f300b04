"""For every flag and argument of every command: wrong values, and what the error must say about each.

A value is what a newcomer might write: of the wrong type, out of range, an unknown name, a missing file, a folder where
a file is meant, nothing.
"""

from collections.abc import Mapping, Sequence

Wrong = Sequence[tuple[str, str]]  # a value, and words that the error has beside it

SWITCH: Wrong = ()  # a test gives every switch a value
# What stands before a wrong value, for those that need something there.
BEFORE: Mapping[str, Sequence[str]] = {
    "run PROMPT": ("python-8m",),
    "run --system": ("python-8m", "def f(", "--raw"),
    "pull --revision": ("acme/tiny",),
    "rm --revision": ("acme/tiny",),
    "bench quality TEXT": ("python-8m",),
    "embed TEXT": ("all-minilm-l6-v2",),
    "repository NAME": ("load",),
    **dict.fromkeys(
        ("rollout --plan", "rollout --hold", "rollout --patience", "rollout --judge"),
        ("start", "ours", "--candidate", "2"),
    ),
    "rollout --candidate": ("start", "ours"),
    "rollout NAME": ("pause",),
    "simulate --trace": ("mooncake",),
    "simulate --fit": ("--json", "costs.json"),
    "simulate --host": ("--serve",),
    "plan fleet --model": ("--rate", "1"),
    "fleet scale --on": ("127.0.0.1:1", "--replicas", "1"),
    "fleet scale --replicas": ("127.0.0.1:1", "--on", "kubernetes:deployment/x"),
    "audit verify --heads": ("requests.jsonl", "--key-file", "requests.jsonl"),
}
# Values that no error shows: a secret, a text that may be long.
NOT_SHOWN = ("--api-key", "--admin-key", "--fleet-key", "--key", "--quota-redis", "--system")

NO_FILE = "no-such-folder/file"
FOLDER = "."

_COUNT: Wrong = (
    ("many", "give a whole number from 1 to 2147483647"),
    ("0", "from 1 to 2147483647"),
    ("-1", "from 1 to 2147483647"),
    ("1.5", "give a whole number"),
    ("99999999999999999999", "to 2147483647"),
    ("", "from 1 to 2147483647"),
)
_RANKS: Wrong = (("two", "give a whole number from 1 to 1024"), ("0", "from 1 to 1024"), ("1025", "from 1 to 1024"))
_SECONDS: Wrong = (("soon", "above 0 up to 86400"), ("0", "above 0"), ("nan", "above 0"), ("", "above 0"))
_SIZE: Wrong = (("lots", "such as 4GiB"), ("-1", "such as 4GiB"), ("", "such as 4GiB"), ("9999999TiB", "from 1 to"))
_EMPTY: Wrong = (("", "it is empty; give a value, or leave it out"),)
_KEY: Wrong = (*_EMPTY, ("two words", "ASCII"), ("two\nlines", "ASCII"), ("schlüssel", "ASCII"), ("k" * 5000, "4096"))
_ENGINES: Wrong = (("nowhere", "write HOST:PORT"), ("host:99999", "write HOST:PORT"))
_NO_PEM: Wrong = (("no-file", "cannot be used"),)
_REVISION: Wrong = (
    *_EMPTY,
    ("../main", "a branch, tag or commit"),
    ("my branch", "without spaces"),
    ("-x", "a branch"),
)
_OUTPUT: Wrong = (
    (NO_FILE, "there is no folder no-such-folder; name another file"),
    (FOLDER, "it is a folder; name another file"),
    ("", "it is empty; name another file"),
)
_CASES: Wrong = (
    ("8x", "write NxIN/OUT"),
    ("0x8/8", "write NxIN/OUT"),
    ("9999999x8/8", "give at most 1000000"),
    ("1x99999999/8", "ask for at most"),
    ("", "write NxIN/OUT"),
)
_LENGTH: Wrong = (("0", "write N or LOW-HIGH"), ("9-3", "LOW-HIGH"), ("a", "LOW-HIGH"), ("9" * 20, "up to 10000000"))
_RUNS: Wrong = (("ten", "give a whole number from 1 to 1000"), ("0", "from 1 to 1000"), ("1001", "from 1 to 1000"))
_URL: Wrong = (
    ("ftp://127.0.0.1", "write for example http://127.0.0.1:8000"),
    ("", "write for example http://127.0.0.1:8000"),
    ("127.0.0.1:port", "write for example http://127.0.0.1:8000"),
    ("127.0.0.1:1", "is a server running there?"),
    ("https://127.0.0.1:1", "is a server running there?"),
)
_AUDIT: Wrong = ((NO_FILE, "there is no --audit; set --audit on"), *_EMPTY)
_DAY: Wrong = (
    ("yesterday", "give a day, such as 2026-11-01"),
    ("2026-13-01", "give a day, such as 2026-11-01"),
    ("", "give a day, such as 2026-11-01"),
)
_LEDGER: Wrong = (
    (NO_FILE, "there is no ledger"),
    (FOLDER, "there is no ledger ledger.sqlite3: name one"),
    ("requests.jsonl", "is no ledger that can be read: file is not a database; name one"),
    ("", "it is empty; name a file"),
)
_LEDGER_OF: Wrong = (
    ("http", "give a whole number from 0 to 65535"),
    ("65536", "from 0 to 65535"),
    ("-1", "from 0 to 65535"),
    ("1", "there is no ledger"),
)
_TENANT: Wrong = (("a b", "give a tenant's name"), ("../a", "give a tenant's name"), ("", "leave it out for all"))
_TENANT_NAME: Wrong = tuple((name, "give up to 64 letters, digits") for name in ("a b", "", "../a", "a" * 65))
_TENANTS: Wrong = (
    (NO_FILE, "no such file or directory; name a YAML file"),
    (FOLDER, "is a directory; name a YAML file"),
    ("", "it is empty; name a YAML file"),
    ("requests.jsonl", "unknown field custom_id"),
)
_READ: Wrong = tuple((name, "there is no such file; name another one") for name in (NO_FILE, FOLDER, ""))
_LABELS: Wrong = (
    (NO_FILE, "no such file or directory; name a file of JSON lines"),
    (FOLDER, "is a directory; name a file of JSON lines"),
    ("", "name a file of JSON lines"),
    ("requests.jsonl", "line 1: "),
)
_PRICES: Wrong = (
    (NO_FILE, "name a YAML file"),
    (FOLDER, "is a directory; name a YAML file"),
    ("", "name a YAML file"),
    ("requests.jsonl", "is wrong: Object"),
)
_TOKENS: Wrong = (("many", "give a whole number"), ("0", "above 0, up to 1000000"), ("1000001", "up to 1000000"))
_MODEL: Wrong = (
    ("./no-such-model", "check the path"),
    ("no such model", ""),
    ("", "check the path"),
)

SHARED: Mapping[str, Wrong] = {
    "--access-log": (("some", "a number from 0 to 1"), ("1.5", "from 0 to 1"), ("-1", "from 0 to 1"), ("", "from 0")),
    "--api-key-file": ((NO_FILE, "name a file of keys"), (FOLDER, "name a file of keys"), *_EMPTY),
    "--log-level": (("loud", "give debug, info, warning or error"), ("", "give debug")),
    "--trusted-proxy": (
        ("proxy.example", "give one such as 127.0.0.1 or 10.0.0.0/8"),
        ("10.0.0.1/8", "is no address and no network"),
        ("", "is no address and no network"),
    ),
    "--vllm-metrics": SWITCH,
    "--allow-insecure-bind": SWITCH,
    "--admin-key": _KEY,
    "--allowed-host": (
        ("https://llm.example.com", "without scheme and port"),
        ("llm.example.com:8000", "without scheme and port"),
        ("*", "is no host name"),
        ("", "is no host name"),
    ),
    "--manage-models": SWITCH,
    "--truncate-embeddings": SWITCH,
    "--api-key": _KEY,
    "--block-size": (("big", "give a whole number from 1 to 1024"), ("0", "1 to 1024"), ("1025", "1 to 1024")),
    "--config": ((NO_FILE, "name a YAML file"), (FOLDER, "is a directory; name a YAML file"), ("", "name a YAML file")),
    "--deterministic": SWITCH,
    "--device": (("gpu", "give auto, cpu or cuda"), ("", "give auto, cpu or cuda")),
    "--distributed-executor": (("threads", "give auto, process or ray"), ("", "give auto, process or ray")),
    "--drain-timeout": _SECONDS,
    "--shutdown-delay": (
        ("soon", "a number from 0 to 86400"),
        ("-1", "from 0 to 86400"),
        ("nan", "from 0"),
        ("", "from 0"),
    ),
    "--cors-origin": (
        ("*", "each origin must be named"),
        ("app.example.com", "give scheme://host[:port]"),
        ("https://app.example.com/", "without a path"),
        ("https://app.example.com:443", "give https://app.example.com"),
        ("null", "give scheme://host[:port]"),
        ("", "give scheme://host[:port]"),
    ),
    "--dtype": (("float16", "give auto, float32 or bfloat16"), ("", "give auto, float32 or bfloat16")),
    "--enable-prefix-caching": SWITCH,
    "--enforce-eager": SWITCH,
    "--event-log": (*_OUTPUT[:2], *_EMPTY),
    "--kv-disk": (
        ("kv", "give a folder"),
        ("kv,much", "give a folder"),
        ("kv,1GiB,0", "up to 3650 days"),
        ("kv,1GiB,7,8", "give a folder"),
        ("/dev/null,1GiB", "it is not a folder"),
        ("", "give a folder"),
    ),
    "--expert-parallel": SWITCH,
    "--first-token-timeout": _SECONDS,
    "--generation-config": (("all", "give"), ("", "give")),
    "--gpu-memory-utilization": (
        ("90%", "give a number above 0 up to 1"),
        ("1.1", "above 0 up to 1"),
        ("0.5", "leave it out"),
    ),
    "--host": (("0.0.0.0", "--api-key"), *_EMPTY),
    "--kv-cache-dtype": (("int4", "give auto, int8 or fp8"), ("fp8", "set --kv-cache-dtype int8"), ("", "give auto")),
    "--kv-cache-memory": _SIZE,
    "--log-format": (("xml", "give text or json"), ("", "give text or json")),
    "--otlp-endpoint": (
        ("localhost:4318", "write for example http://localhost:4318"),
        ("http://", "is not a URL"),
        ("http://localhost:port", "is not a URL"),
        *_EMPTY,
    ),
    "--max-body-size": _SIZE,
    "--max-choices": _COUNT,
    "--max-in-flight": _COUNT,
    "--max-logprobs": (("all", "from 0 to 1000"), ("1001", "from 0 to 1000"), ("-1", "from 0 to 1000")),
    "--max-model-len": (*_COUNT, ("2000000000", "made for at most")),
    "--max-num-batched-tokens": (*_COUNT, ("1", "or more")),
    "--max-num-seqs": _COUNT,
    "--max-priority": (("high", "from 0 to 86400"), ("-1", "from 0 to 86400"), ("86401", "from 0 to 86400")),
    "--max-prompts": _COUNT,
    "--max-sequences": _COUNT,
    "--max-stop-strings": _COUNT,
    "--max-waiting": _COUNT,
    "--max-waiting-tokens": _COUNT,
    "--pipeline-parallel-size": (*_RANKS, ("1000", "use")),
    "--port": (("http", "from 0 to 65535"), ("65536", "from 0 to 65535"), ("-1", "from 0 to 65535")),
    "--api-processes": (
        ("two", "from 1 to 64"),
        ("0", "from 1 to 64"),
        ("65", "from 1 to 64"),
        ("1.5", "whole number"),
    ),
    "--grpc-port": (("http", "from 0 to 65535"), ("65536", "from 0 to 65535"), ("-1", "from 0 to 65535")),
    "--quantization": (("int6", "give none, int8, int4 or fp8"), ("", "give none"), ("fp8", "--quantization int8")),
    "--quantization-group": (
        ("16", "give 32, 64 or 128"),
        ("some", "give 32, 64 or 128"),
        ("64", "--quantization int4"),
    ),
    "--request-timeout": _SECONDS,
    "--revision": (("main", "leave"), *_REVISION),
    "--seed": (("random", "from 0 to 18446744073709551615"), ("-1", "from 0"), ("99999999999999999999", "from 0")),
    "--served-model-name": (("a,,b", "give one name"), ("a,a", "different ones"), *_EMPTY),
    "--max-answer-size": _SIZE,
    "--num-speculative-tokens": (("many", "from 1 to 64"), ("0", "from 1 to 64"), ("65", "from 1 to 64")),
    "--reasoning-format": (("xml", "auto"), ("", "auto")),
    "--speculation": (("on", "give auto, off, ngram or suffix"), ("", "give auto")),
    "--thinking-budget": (("many", "from 0 to 2147483647"), ("-1", "from 0 to 2147483647")),
    "--watermark": (("red", "give none, green-list or gumbel"), ("", "give none"), ("gumbel", "WATERMARK_KEY")),
    "--watermark-key": (("", "it is empty"),),
    "--tool-format": (("xml", "auto"), ("", "auto")),
    "--sleep-after": _SECONDS,
    "--step-deadline": _SECONDS,
    "--target-itl": (("fast", "from 0 to 60000"), ("-1", "from 0 to 60000"), ("nan", "from 0"), ("", "from 0")),
    "--tensor-parallel-size": (*_RANKS, ("1000", "use")),
    "--tls-certificate": (
        (NO_FILE, "cannot be read: No such file or directory; name a PEM file"),
        (FOLDER, "Is a directory; name a PEM file"),
        ("/dev/null", "is not a file"),
        ("/etc/passwd", "holds no certificate in PEM"),
        *_EMPTY,
    ),
    "--tls-key": ((NO_FILE, "there is no certificate; set --tls-certificate"), *_EMPTY),
    "--state-dir": (("/dev/null", "it is not a folder"), ("", "it is empty; give a value")),
    "--wires": (("grpc", "give different names of openai"), ("openai,openai", "different"), ("", "openai")),
    "--repository": (
        *_EMPTY,
        (NO_FILE, "there is no such folder; create it, or name another one"),
        ("requests.jsonl", "there is no such folder"),
    ),
    "--providers": (
        *_EMPTY,
        (NO_FILE, "cannot be read"),
        ("wrong_providers.yaml", "at providers.x.url: it is 'http://127.0.0.1:1/v1': plain HTTP or a private address"),
    ),
    "--load-model": (("python-8m", "there is no --repository; add it"), ("", "give names")),
    "--client-shared-memory": (*_SIZE, ("4096", "there is no --repository; add it")),
    "--max-loaded": (*_COUNT, ("2", "there is no --repository; add it")),
    "--min-stay": _SECONDS,
    "--tenants": (
        (NO_FILE, "no such file or directory; name a YAML file"),
        (FOLDER, "is a directory; name a YAML file"),
        ("requests.jsonl", "unknown field custom_id"),
        *_EMPTY,
    ),
    "--quota-redis": (("redis://127.0.0.1", "there is no --tenants; add it"), *_EMPTY),
    "--ledger-days": (("many", "from 1 to 36500"), ("0", "from 1 to 36500"), ("36501", "from 1 to 36500")),
    "--request-log": ((NO_FILE, "there is no --tenants; add it"), *_EMPTY),
    "--audit": (("yes", "give none, on or required"), ("on", "there is no --tenants; add it"), ("", "give none")),
    "--audit-file": _AUDIT,
    "--audit-heads": _AUDIT,
    "--audit-key-file": _AUDIT,
    "--replicas": (
        ("two", "give a whole number from 1 to 64"),
        ("0", "from 1 to 64"),
        ("65", "from 1 to 64"),
        ("3:2", "two such as 1:4"),
    ),
    "--prefill-replicas": (
        ("1", "set --replicas to a number above 1"),
        ("65", "from 0 to 64"),
        ("some", "give a whole number"),
    ),
    "--scale-down-after": _SECONDS,
    "--hold-timeout": _SECONDS,
    "--preemption-notice": _EMPTY,
    "--engines": _EMPTY,
    "--route": (("random", "give cost or round-robin"), ("", "give cost")),
    "--move-anywhere": SWITCH,
    "--fleet-key": _EMPTY,
    "--fleet-ca": _EMPTY,
    "--threads": (*_COUNT, ("100000", "set --threads")),
}

OWN: Mapping[str, Mapping[str, Wrong]] = {
    "detect": {
        "TEXT": (("", "there is no key: set PENSTOCK_WATERMARK_KEY"),),
        "--model": (("", "set PENSTOCK_WATERMARK_KEY"),),
        "--watermark": (("red", "give none, green-list or gumbel"),),
        "--config": ((NO_FILE, "name a YAML file"),),
        "--json": _OUTPUT,
    },
    "serve": {"MODEL": _MODEL, "--model": _MODEL},
    "engine": {
        "MODEL": _MODEL,
        "--listen": (("nowhere", "write HOST:PORT"), ("host:99999", "write HOST:PORT")),
        "--role": (("any", "'alone', 'both', 'prefill', 'decode'"), ("", "'alone'")),
        "--page-port": (("65536", "65535"), ("-1", "0"), ("some", "some")),
    },
    "fleet status": {"ENGINES": _ENGINES, "--fleet-key": _KEY, "--fleet-ca": _NO_PEM},
    "fleet drain": {
        "ENGINES": _ENGINES,
        "--grace": (("-1", "0"), ("soon", "soon")),
        "--fleet-key": _KEY,
        "--fleet-ca": _NO_PEM,
    },
    "fleet scale": {
        "ENGINES": (("nowhere", "write HOST:PORT"),),
        "--on": (("docker", "give ray, or kubernetes:"), ("kubernetes:job/x", "deployment"), ("ray", "needs --run")),
        "--replicas": (("many", "from 1 to 64"), ("4:2", "two such as 1:4")),
        "--threads": (("0", "1"), ("all", "all")),
        "--run": (("tiny", "only Ray starts engines from it: leave it out"),),
        "--servers": (("ftp://x", "is not a server's address"),),
        "--kubernetes-api": (("ftp://x", "is not a server's address"),),
        "--window": (("0", "1"), ("soon", "soon")),
        "--idle": (("-1", "0"), ("never", "never")),
        "--standby": (("-1", "0"), ("some", "some")),
        "--fleet-key": _KEY,
        "--fleet-ca": _NO_PEM,
    },
    "run": {
        "MODEL": (("./no-such-model", "check the path"),),
        "PROMPT": (("", "write at least a word"), (" ", "write at least a word")),
        "--model": _MODEL,
        "--max-tokens": (("many", "give a whole number from 1"), ("0", "from 1"), ("-1", "from 1")),
        "--temperature": (("hot", "give a number from 0 to 100"), ("-1", "from 0"), ("nan", "from 0")),
        "--top-p": (("most", "from 0 to 1"), ("2", "to 1"), ("-1", "from 0")),
        "--top-k": (("all", "give a whole number from 0"), ("-1", "from 0")),
        "--min-p": (("low", "from 0 to 1"), ("2", "to 1")),
        "--repetition-penalty": (("high", "from 0.01 to 100"), ("-1", "from 0.01")),
        "--top-n-sigma": (("low", "give a number from 0"), ("-1", "from 0")),
        "--presence-penalty": (("high", "from -2 to 2"), ("3", "to 2")),
        "--frequency-penalty": (("high", "from -2 to 2"), ("-3", "from -2")),
        "--seed": (("random", "give a whole number from 0"), ("-1", "from 0"), ("9" * 20, "to 18446744073709551615")),
        "--system": (("Be brief.", "leave --system out"),),
        "--raw": SWITCH,
        "--stats": SWITCH,
        "--history": SWITCH,
    },
    "plan": {
        "MODEL": _MODEL,
        "--model": _MODEL,
        "--hardware": (("8xH1000", "name A100, H100"), ("0xH100", "name 1 to 4096"), ("", "name A100, H100")),
        "--link": (("fast", "25GB/s"), ("-3GB/s", "25GB/s"), ("", "25GB/s")),
        "--json": _OUTPUT,
    },
    "plan fleet": {
        "--model": (("gpt-5", "give a folder with config.json, a GGUF file, or one of"), ("", "no config.json")),
        "--rate": (
            ("many", "give a number"),
            *((value, "above 0, up to 100000") for value in ("0", "-1", "nan", "inf", "100001")),
        ),
        "--prompt": _TOKENS,
        "--output": _TOKENS,
        "--cached": (("all", "give a number"), ("1", "from 0 to less than 1"), ("-1", "from 0"), ("nan", "from 0")),
        "--ttft": (("soon", "give a number"), ("0", "above 0, up to 3600"), ("3601", "up to 3600"), ("nan", "above 0")),
        "--tpot": (("soon", "give a number"), ("0", "above 0, up to 60"), ("61", "up to 60"), ("nan", "above 0")),
        "--share": (("most", "give a number"), ("1", "from 0.5 to less than 1"), ("0.4", "from 0.5"), ("nan", "0.5")),
        "--device": (("H1000", "name one of A100, H100"), ("", "name one of A100, H100")),
        "--prices": _PRICES,
        "--simulated": (("all", "from 0 to 20"), ("21", "from 0 to 20"), ("-1", "from 0 to 20")),
        "--json": _OUTPUT,
    },
    "simulate": {
        "SCENARIO": (
            (NO_FILE, "give a file, or one of batch-size"),
            (FOLDER, "give a file, or one of batch-size"),
            ("", "give a file, or one of batch-size"),
            ("requests.jsonl", "unknown field `custom_id`"),
        ),
        "--list": SWITCH,
        "--show": SWITCH,
        "--seed": (("random", "give a whole number from 0"), ("-1", "from 0")),
        "--duration": (
            ("soon", "give a number from 0.001 to 10000000"),
            ("0", "from 0.001"),
            ("nan", "from 0.001"),
            ("10000001", "to 10000000"),
        ),
        "--trace": (
            (NO_FILE, "there is no such file; name another one"),
            (FOLDER, "there is no such file; name another one"),
            ("", "there is no such file; name another one"),
        ),
        "--prices": _PRICES,
        "--fit": (
            (NO_FILE, "give --fit the file of serve --event-log"),
            (FOLDER, "give --fit the file of serve --event-log"),
            ("requests.jsonl", "serve --event-log"),
        ),
        "--json": _OUTPUT,
        "--html": _OUTPUT,
        "--serve": SWITCH,
        "--host": _EMPTY,
        "--port": (("http", "from 0 to 65535"), ("65536", "from 0 to 65535"), ("-1", "from 0 to 65535")),
    },
    "quantize": {
        "MODEL": _MODEL,
        "OUT": (
            ("requests.jsonl", "is there already: remove it, or name another"),
            (FOLDER, "is there already"),
            ("out.gguf", "use --scheme gguf:Q4_K_M"),
            ("", "it is empty; name a folder"),
        ),
        "--scheme": (
            ("int6", "use one of int8, int4, int3"),
            ("", "use one of int8"),
            ("gguf:Q4_K_M", "name one that ends in .gguf"),
        ),
        "--group": (
            ("some", "give a whole number"),
            ("17", "use 32, 64 or 128"),
            ("-1", "use 32, 64 or 128"),
            ("512", "up to 256"),
        ),
        "--zero-points": SWITCH,
        "--format": (("zip", "use --format compressed-tensors"), ("gguf", "use --format"), ("", "use --format")),
        "--method": (("best", "use one of auto, rtn, mse, awq, gptq"), ("", "use one of auto")),
        "--calibration": (
            (NO_FILE, "name a text file"),
            (FOLDER, "name a text file"),
            ("", "name a text file"),
            ("requests.jsonl", "name a longer text"),
        ),
        "--windows": (("many", "from 1 to 100000"), ("0", "from 1 to 100000"), ("100001", "from 1 to 100000")),
        "--keep": (("nothing", "use names or patterns such as"), ("*", "leaves no matrix")),
        "--table": SWITCH,
        "--threads": (("many", "from 1 to 1024"), ("0", "from 1 to 1024"), ("1025", "from 1 to 1024")),
        "--json": _OUTPUT,
    },
    "repository": {
        "WHAT": (("remove", "give status, load or unload"), ("", "give status, load or unload")),
        "NAME": (("", "penstock repository load takes the name of a model"),),
        "--url": _URL,
        "--dependents": SWITCH,
        "--key": _KEY,
    },
    "rollout": {
        "WHAT": (("remove", "give status, start, pause"), ("", "give status, start, pause")),
        "NAME": (("", "penstock rollout pause takes the name of a model"),),
        "--candidate": (("0", "give a whole number from 1 on"), ("two", "give a whole number from 1 on")),
        "--plan": (("half", "give shares in percent"), ("", "give shares in percent")),
        "--hold": (("-1", "give a number from 0 on"), ("long", "give a number from 0 on")),
        "--patience": (("-1", "give a number from 0 on"), ("long", "give a number from 0 on")),
        "--judge": (("brier", "give NAME=TOLERANCE"), ("", "give NAME=TOLERANCE")),
        "--url": _URL,
        "--key": _KEY,
    },
    "tenants add": {
        "FILE": ((NO_FILE, "there is no folder no-such-folder; name another file"), *_TENANTS[1:]),
        "TENANT": _TENANT_NAME,
        "--key": (("a b", "--key is 'a b': give up to 64 letters"), ("", "--key is '': give up to 64 letters")),
        "--expires-in": (("soon", "from 1 to 36500"), ("0", "from 1 to 36500"), ("36501", "from 1 to 36500")),
        "--model": (("", "--model is '': give the name of a model"),),
        "--wire": (("soap", "give one of openai"), ("", "give one of openai")),
        "--admin": SWITCH,
    },
    "tenants rotate": {
        "FILE": _TENANTS,
        "TENANT": (("nobody", "give one of search"), ("", "give one of search")),
        "--key": (("ci", "has no key 'ci': give one of these: default"), ("", "has no key '': give one of these")),
        "--keep-days": (("many", "from 0 to 366"), ("-1", "from 0 to 366"), ("367", "from 0 to 366")),
    },
    "tenants list": {"FILE": _TENANTS},
    "tenants check": {"FILE": _TENANTS},
    "ledger summary": {
        "--by": (("team", "give names of tenant, key"), ("tenant,", "give names of tenant"), ("", "give names")),
        "--since": _DAY,
        "--until": _DAY,
        "--tenant": _TENANT,
        "--ledger": _LEDGER,
        "--port": _LEDGER_OF,
        "--json": SWITCH,
    },
    "ledger export": {
        "--since": _DAY,
        "--until": _DAY,
        "--tenant": _TENANT,
        "--format": (("xml", "give csv or jsonl"), ("", "give csv or jsonl")),
        "--ledger": _LEDGER,
        "--port": _LEDGER_OF,
    },
    "route fit": {"LABELS": _LABELS, "--out": _OUTPUT},
    "route evaluate": {
        "LABELS": _LABELS,
        "--classifier": (
            (NO_FILE, "no such file or directory; name a file of penstock route fit"),
            (FOLDER, "is a directory; name a file of penstock route fit"),
            ("labels.jsonl", "has no classifier"),
        ),
    },
    "audit verify": {"FILE": _READ, "--heads": _READ, "--key-file": _READ, "--ledger": _READ},
    "logs": {
        "--tenant": _TENANT,
        "--slow": (("soon", "give a number from 0"), ("-1", "from 0"), ("nan", "from 0")),
        "--errors": SWITCH,
        "--last": (("all", "from 1 to 1000000"), ("0", "from 1 to 1000000"), ("1000001", "from 1 to 1000000")),
        "--ledger": _LEDGER,
        "--port": _LEDGER_OF,
        "--json": SWITCH,
    },
    "verify": {"MODEL": _MODEL, "--json": _OUTPUT},
    "embed": {
        "MODEL": (
            *_MODEL,
            ("smollm2-135m", "an embedding model, such as all-minilm-l6-v2"),
            ("hello", "penstock embed all-minilm-l6-v2 TEXT"),
        ),
        "TEXT": (("", "must have 1 to"), (" ", "not only blanks")),
    },
    "list": {"--json": SWITCH},
    "models": {"--json": SWITCH},
    "pull": {
        "MODEL": (("./no-such-model", "check the path"), ("", "check the path"), ("a b", "org/model")),
        "--revision": _REVISION,
    },
    "show": {"MODEL": _MODEL, "--revision": _REVISION, "--template": SWITCH, "--json": SWITCH},
    "manifest": {"MODEL": _MODEL, "--revision": _REVISION, "--check": SWITCH},
    "rm": {
        "MODEL": (("./no-such-model", ""), ("python-8m", "part of Penstock")),
        "--revision": _REVISION,
        "--yes": SWITCH,
    },
    "completion": {"SHELL": (("tcsh", "bash, zsh, fish"), ("", "bash, zsh, fish"))},
    "replay": {
        "FILE": (
            (NO_FILE, "give the file of penstock serve --event-log"),
            (FOLDER, "give the file of penstock serve --event-log"),
            ("", "give the file of penstock serve --event-log"),
        )
    },
    "batch": {
        "REQUESTS": (
            (NO_FILE, "name a file of JSON lines"),
            (FOLDER, "name a file of JSON lines"),
            ("", "name a file of JSON lines"),
        ),
        "ANSWERS": _OUTPUT,
        "--model": _MODEL,
    },
    "bench throughput": {"MODEL": _MODEL, "--cases": _CASES, "--runs": _RUNS, "--json": _OUTPUT},
    "bench latency": {"MODEL": _MODEL, "--cases": _CASES, "--runs": _RUNS, "--json": _OUTPUT},
    "bench quality": {
        "MODEL": _MODEL,
        "TEXT": ((NO_FILE, "name a text file"), (FOLDER, "name a text file")),
        "--windows": (("all", "from 1 to 1000000"), ("0", "from 1")),
        "--window-tokens": (("all", "from 2 to 10000000"), ("1", "from 2"), ("100000", "ask for at most")),
        "--dense": SWITCH,
        "--tokens-in": ((NO_FILE, "name a file of --tokens-out"), (FOLDER, "is a directory"), ("", "--tokens-out")),
        "--tokens-out": _OUTPUT,
        "--against": (
            ("./no-such-model", "check the path"),
            ("no such model", "penstock list shows the names"),
            ("python-8m", "compares models of one vocabulary"),
            ("", "check the path"),
        ),
        "--json": _OUTPUT,
    },
    "reload": {"URL": _URL, "--drain-first": SWITCH, "--admin-key": _KEY},
    "sleep": {"URL": _URL, "--admin-key": _KEY},
    "wake": {"URL": _URL, "--admin-key": _KEY},
    "ps": {"URL": _URL, "--key": _KEY},
    "stop": {"NAME": (("", "give the name of a model"),), "--url": _URL, "--key": _KEY},
    "top": {
        "URL": _URL,
        "--once": SWITCH,
        "--interval": (("often", "give a number from 0.2 to 3600"), ("0", "from 0.2"), ("nan", "from 0.2")),
        "--api-key": _KEY,
    },
    "bench serve": {
        "--url": (
            ("127.0.0.1:8000", "write --url http://127.0.0.1:8000"),
            ("http://127.0.0.1:1", "is a server running there?"),
            ("", "write --url http://127.0.0.1:8000"),
        ),
        "--model": _EMPTY,
        "--api-key": _KEY,
        "--wire": (
            ("grpc", "give openai or kserve"),
            ("kserve", "--wire kserve needs --model"),
            ("", "give openai or kserve"),
        ),
        "--num-prompts": (("many", "from 1 to 1000000"), ("0", "from 1"), ("1000001", "to 1000000")),
        "--input-len": _LENGTH,
        "--output-len": _LENGTH,
        "--shared-prefix": (("all", "from 0"), ("-1", "from 0")),
        "--vocab-size": (("all", "from 16"), ("2", "from 16")),
        "--request-rate": (("fast", "give a number"), ("0", "give a number above 0"), ("nan", "give a number above 0")),
        "--burstiness": (("high", "give a number"), ("-1", "give a number above 0"), ("nan", "inf for equal gaps")),
        "--concurrency": (("all", "from 1"), ("0", "from 1"), ("100001", "to 100000")),
        "--slo": (("speed=1", "ttft"), ("ttft=soon", "in seconds"), ("", "ttft=0.5,tpot=0.05")),
        "--seed": (("random", "give a whole number from 0"), ("-1", "from 0")),
        "--json": _OUTPUT,
    },
}
