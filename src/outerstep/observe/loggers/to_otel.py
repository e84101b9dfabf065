"""OpenTelemetry: gauges with the attributes `outerstep.run` and `outerstep.who`.

A script that has set a meter provider of its own gets them there. Else they go out by OTLP over HTTP, where the usual
variables say (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_METRIC_EXPORT_INTERVAL).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OtelWriter:
    def __init__(self, place: Path, run: str, who: str) -> None:
        self._provider, self._own = meter_provider()
        self._meter = self._provider.get_meter("outerstep")
        self._gauges: dict[str, Any] = {}
        self._about = {"outerstep.run": run, "outerstep.who": who}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, "outerstep/step": float(step)}.items():
            plain, about = _named(name)
            if plain not in self._gauges:
                self._gauges[plain] = self._meter.create_gauge(plain)
            self._gauges[plain].set(value, {**self._about, **about})

    def close(self) -> None:
        if self._own:
            self._provider.shutdown()


def _named(name: str) -> tuple[str, dict[str, str]]:
    """outerstep/fragment_1/loss_of/left → outerstep.loss_of of fragment 1 and worker left: names are few."""
    parts, about = name.split("/"), dict[str, str]()
    if len(parts) > 2 and parts[1].startswith("fragment_"):
        about["fragment"] = parts.pop(1).removeprefix("fragment_")
    if len(parts) > 2:
        about["worker"] = "/".join(parts[2:])
    return ".".join(parts[:2]), about


def meter_provider() -> tuple[Any, bool]:
    """That of the process, or one of ours (True), which has to be shut down."""
    from opentelemetry.metrics import get_meter_provider
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    known = get_meter_provider()
    if isinstance(known, MeterProvider):
        return known, False
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=Resource.create({"service.name": "outerstep"})), True
