# One image for all our processes: docker build -t rollstream/rollstream:0.1.0 .
# The command is the process: gateway, processor, sink clickhouse, sink objects, topics apply.
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/rollstream
COPY constraints.txt /src/
RUN /opt/rollstream/bin/pip install --no-cache-dir -c /src/constraints.txt uv
COPY pyproject.toml README.md LICENSE /src/
COPY rollstream /src/rollstream
COPY schemas /src/schemas
COPY producers /src/producers
COPY processors /src/processors
COPY sinks /src/sinks
COPY trainers /src/trainers
RUN cd /src && VIRTUAL_ENV=/opt/rollstream /opt/rollstream/bin/uv pip install --no-cache \
        -c constraints.txt '.[gateway,processor,sink,registry]' \
    && /opt/rollstream/bin/pip uninstall --yes uv

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --user-group --home-dir /var/lib/rollstream --create-home rollstream
COPY --from=build /opt/rollstream /opt/rollstream
COPY pipelines /etc/rollstream/pipelines
ENV PATH=/opt/rollstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ROLLSTREAM_PROCESSOR__PIPELINE=/etc/rollstream/pipelines/default.yaml
WORKDIR /var/lib/rollstream
USER 10001:10001
EXPOSE 8600
ENTRYPOINT ["rollstream"]
CMD ["--help"]
