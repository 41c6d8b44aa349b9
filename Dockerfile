# The operator, and the image of jobs that `covey submit` starts: docker build --target operator|training
FROM python:3.11-slim AS base
WORKDIR /covey
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src

FROM base AS operator
RUN pip install --no-cache-dir -c constraints.txt '.[k8s]'
USER 65532
ENTRYPOINT ["covey"]
CMD ["operator", "run"]

FROM base AS training
RUN pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt .
# what a submitted example imports beside itself
COPY examples/digits.py examples/
COPY examples/data examples/data
ENV PYTHONPATH=/covey/examples
WORKDIR /work
