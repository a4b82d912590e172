"""The step-time model of an engine, and fits of it to what an engine logs.

:func:`read_log` and :func:`windows_of` make windows of steps from a server's log, :func:`fit` makes
a :class:`StepTimeModel` from them, with errors and residuals, and :class:`OnlineFit` updates a
model window by window while an engine runs.
"""

from aprilsched.planning.step_times.calibration import (
    Fit,
    Residuals,
    fit,
    predicted_seconds,
    residuals_of,
)
from aprilsched.planning.step_times.model import StepTimeModel
from aprilsched.planning.step_times.model_file import load_model, model_toml, save_model
from aprilsched.planning.step_times.online import Observation, OnlineFit
from aprilsched.planning.step_times.server_log import LogLine, Windows, read_log, windows_of

__all__ = [
    "Fit",
    "LogLine",
    "Observation",
    "OnlineFit",
    "Residuals",
    "StepTimeModel",
    "Windows",
    "fit",
    "load_model",
    "model_toml",
    "predicted_seconds",
    "read_log",
    "residuals_of",
    "save_model",
    "windows_of",
]
