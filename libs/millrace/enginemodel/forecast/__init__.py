"""Forecasts of an instance's future if it took a request, by the engine's own rules. See README.md."""

from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import (
    Candidate,
    Forecast,
    JoinForecast,
    LeaveForecast,
    LoadForecast,
)

__all__ = [
    "Candidate",
    "Forecast",
    "Forecaster",
    "JoinForecast",
    "LeaveForecast",
    "LoadForecast",
]
