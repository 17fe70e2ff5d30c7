"""Sinks that hand events to the tools which watch a service, each with a package of its own behind it.

`lifecycle.exporters.prometheus`
    metrics, through `prometheus_client` (`pip install "engine-lifecycle[prometheus]"`).
`lifecycle.exporters.opentelemetry`
    spans, through `opentelemetry-api` (`pip install "engine-lifecycle[opentelemetry]"`).

Nothing is imported here, so neither package has to be there for the other.
"""
