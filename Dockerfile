# syntax=docker/dockerfile:1

FROM python:3.13.15-slim-trixie@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b AS build
WORKDIR /src
# Without requirements-embedded.lock: DATABASE_URL names the database.
COPY requirements.lock requirements-embed.lock requirements-nats.lock requirements-otel.lock ./
RUN python -m venv /opt/bottega \
 && /opt/bottega/bin/pip install --no-cache-dir --require-hashes -r requirements.lock \
    -r requirements-embed.lock -r requirements-nats.lock -r requirements-otel.lock
COPY pyproject.toml README.md LICENSE NOTICE alembic.ini ./
COPY migrations ./migrations
COPY app ./app
RUN /opt/bottega/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13.15-slim-trixie@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b
RUN useradd --system --uid 10001 --create-home bottega \
 && install -d -o bottega -m 0700 /var/lib/bottega/objects
COPY --from=build /opt/bottega /opt/bottega
ENV PATH=/opt/bottega/bin:$PATH PYTHONUNBUFFERED=1 BOTTEGA_HOST=0.0.0.0 BOTTEGA_PORT=8400
USER bottega
EXPOSE 8400
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8400/healthz', timeout=4)"]
ENTRYPOINT ["bottega"]
CMD ["serve"]
