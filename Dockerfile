# vision in a container, for CPUs or CUDA:
#   docker build -t vision .
#   docker build -t vision:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
#   docker run --rm -v "$PWD/outputs:/runs/outputs" vision train experiment=shapes_fast
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/runs" vision:cuda train data=folder data.root=images
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD:/runs" vision \
#       serve checkpoint=outputs/latest host=0.0.0.0 token=A_SECRET_OF_16_LETTERS
FROM python:3.11-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve,export,search
# OpenMP for torch; the wheels bring everything else, CUDA's libraries included.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/vision
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY vision ./vision
COPY hydra_plugins ./hydra_plugins
COPY configs ./configs
RUN pip install --no-cache-dir --extra-index-url "$TORCH" -c constraints.txt ".[$EXTRAS]"
RUN useradd --create-home vision && mkdir /runs && chown vision /runs
USER vision
WORKDIR /runs
ENTRYPOINT ["vision"]
CMD ["--help"]
