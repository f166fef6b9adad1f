# syntax=docker/dockerfile:1
# RookWorld without installing anything else:
#
#   docker build --target cpu  -t rookworld .        # or --target cuda -t rookworld:cuda
#   docker run --rm -v "$PWD/data:/data" rookworld train --preset demo
#   docker run --rm --gpus all -v "$PWD/data:/data" rookworld:cuda train --preset h200
#
# Runs, and what was fetched from the hub, are in /data.

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/data/hub \
    ROOKWORLD_CACHE=/data/cache \
    STOCKFISH_PATH=/usr/games/stockfish
RUN apt-get update \
    && apt-get install -y --no-install-recommends stockfish \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rookworld \
    && install -d -o rookworld -g rookworld /data
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs ./configs
COPY src ./src

# 2.13.0+cpu is a later version than 2.13.0, so pip takes the smaller wheel
FROM base AS cpu
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt \
    ".[sweep,tensorboard,gpt2]"
USER rookworld
WORKDIR /data
ENTRYPOINT ["rookworld"]
CMD ["--help"]

# torch brings CUDA; the host brings the driver. Triton compiles its launchers with a C compiler
FROM base AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install -c constraints.txt ".[sweep,tensorboard,gpt2]"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER rookworld
WORKDIR /data
ENTRYPOINT ["rookworld"]
CMD ["--help"]
