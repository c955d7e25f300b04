"""Metrics and logs. Nothing global: a `Metrics` is made with a registry and passed on."""

from penstock.observe.logs import JsonFormatter, configure_logging
from penstock.observe.metrics import Metrics
from penstock.observe.model import EngineView, ModelMetrics
from penstock.observe.series import Histogram

__all__ = ["EngineView", "Histogram", "JsonFormatter", "Metrics", "ModelMetrics", "configure_logging"]
