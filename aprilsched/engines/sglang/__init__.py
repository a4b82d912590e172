"""The adapter to an SGLang server over HTTP."""

from aprilsched.engines.http.limits import SGLangLimits
from aprilsched.engines.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine", "SGLangLimits"]
