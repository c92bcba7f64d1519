# dagrl on NVIDIA GPUs: CUDA 13, Python 3.12, Megatron-core with Transformer Engine, flash-attn and Apex, SGLang and vLLM.
#
# NOT BUILT IN CI, which has neither a Docker engine nor a GPU. The requirement files resolve together;
# transformer-engine, sglang and megatron-core were run together on H200s, outside of a container; flash-attn and Apex
# have not been tried. What to check when you build it first:
#   1. the tag of the base image exists, and its CUDA release (`nvcc --version`) is the one that torch was built with
#      (`python -c "import torch; print(torch.version.cuda)"`); Apex refuses to build where they differ;
#   2. Apex and flash-attn compile against this torch; if Apex's commit does not, set APEX_REF to one that does;
#   3. `dagrl doctor` inside, and `pytest -m gpu`.
#
#   docker build -t dagrl .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 dagrl doctor

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# Compute capability of the GPUs: 9.0 is Hopper. Several, as "9.0;10.0", make the builds longer.
ARG CUDA_ARCHS="9.0"
# Compilers at once: each takes some GiB of memory.
ARG MAX_JOBS=8
# A commit that several public projects build beside Megatron-core.
ARG APEX_REF=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4

ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:$PATH \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential ca-certificates cmake git libnuma1 ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Builds without isolation, below, find their tools here.
RUN python3.12 -m venv /opt/venv \
    && pip install --no-cache-dir uv==0.13.8 \
    && uv pip install --no-cache --python /opt/venv packaging psutil pybind11 setuptools==81.0.0 wheel

COPY requirements /tmp/requirements
WORKDIR /tmp/requirements

# torch first: what follows is compiled against it.
RUN uv pip install --no-cache --python /opt/venv -r base.txt --override gpu-overrides.txt

RUN TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" NVTE_CUDA_ARCHS="$(echo "$CUDA_ARCHS" | tr -d .)" \
    uv pip install --no-cache --python /opt/venv -r base.txt -r gpu.txt --override gpu-overrides.txt \
        --no-build-isolation-package transformer-engine-torch

# megatron-bridge, without its dependencies, which clash with SGLang's: the file says more.
RUN uv pip install --no-cache --python /opt/venv --no-deps -r bridge.txt

# The newest 2.8 that Transformer Engine 2.20 takes. On Hopper it uses cuDNN's attention where that is faster.
# It needs einops, which bridge.txt has.
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="$(echo "$CUDA_ARCHS" | tr -d .)" \
    uv pip install --no-cache --python /opt/venv --no-deps --no-build-isolation flash-attn==2.8.3.post2

# Fused gradient accumulation for Megatron-core. Apex is on no registry: the `apex` there is another project.
RUN git clone https://github.com/NVIDIA/apex /tmp/apex \
    && cd /tmp/apex \
    && git checkout "$APEX_REF" \
    && TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=$MAX_JOBS \
        pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf /tmp/apex

COPY . /opt/dagrl
WORKDIR /opt/dagrl
RUN uv pip install --no-cache --python /opt/venv --no-deps --editable . \
    && uv pip install --no-cache --python /opt/venv -r requirements/dev.txt -r requirements/docs.txt

# vLLM's own environment, beside that of the driver: `environment: vllm` of an engine names it (docs/vllm.md).
RUN uv venv --python /opt/venv/bin/python /opt/venv-vllm \
    && uv pip install --no-cache --python /opt/venv-vllm --override requirements/vllm-overrides.txt \
        -r requirements/vllm.txt vllm==0.26.0 \
    && uv pip install --no-cache --python /opt/venv-vllm --no-deps --editable .

# Megatron-core overlaps communication with computation only if kernels are queued in the order of their launch.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1

ENTRYPOINT ["dagrl"]
CMD ["--help"]
