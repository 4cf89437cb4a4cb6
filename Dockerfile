# cpmcu's server on NVIDIA GPUs:
#   docker build -t cpmcu .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v /models:/models cpmcu --model /models/DIR
# Without --model it serves the small model that ships with cpmcu.
ARG CUDA=13.0.1

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
ARG CPMCU_CUDA_ARCH=80,86,89,90a
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY cpmcu cpmcu
RUN python3 -m venv /opt/cpmcu \
 && CPMCU_WITH_CUDA=1 /opt/cpmcu/bin/pip install --no-cache-dir '.[server,grammar]'

# The runtime image has cuBLASLt, which prompts use.
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home cpmcu
COPY --from=build /opt/cpmcu /opt/cpmcu
ENV PATH=/opt/cpmcu/bin:$PATH
USER cpmcu
WORKDIR /home/cpmcu
EXPOSE 8000
# Loading a large model takes a while; /health says 503 until it is done.
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python", "-m", "cpmcu.server", "--host", "0.0.0.0", "--port", "8000"]
