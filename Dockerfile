# Images of the operator and of jobs that `covey submit` creates: docker build --target operator|training
FROM python:3.11-slim AS base
WORKDIR /covey
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# the wheel contains the digits on which `covey federated simulate` trains
COPY examples/data examples/data

FROM base AS operator
RUN pip install --no-cache-dir -c constraints.txt '.[k8s]'
USER 65532
ENTRYPOINT ["covey"]
CMD ["operator", "run"]

FROM base AS training
RUN pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt .
# the module that submitted examples import; it reads the digits in examples/data
COPY examples/digits.py examples/
ENV PYTHONPATH=/covey/examples
WORKDIR /work
