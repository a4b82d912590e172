"""What one engine's step time is, from what its server logs: offline, and while it runs.

:func:`read_log` and :func:`windows_of` make windows of steps from a server's log, :func:`fit` a
:class:`~aprilsched.timing.StepTimeModel` from them, with errors and residuals;
:class:`OnlineFit` follows an engine window by window.
"""

from aprilsched.calibration.fitting import Fit, fit, predicted_seconds
from aprilsched.calibration.logs import read_log
from aprilsched.calibration.model_file import load_model, model_toml, save_model
from aprilsched.calibration.online import Observation, OnlineFit
from aprilsched.calibration.records import LogLine, Windows, windows_of
from aprilsched.calibration.residuals import Bucket, Residuals, residuals_of

__all__ = [
    "Bucket",
    "Fit",
    "LogLine",
    "Observation",
    "OnlineFit",
    "Residuals",
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
