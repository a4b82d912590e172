"""The adapter to an SGLang server over HTTP."""

from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.limits import SGLangLimits

__all__ = ["SGLangEngine", "SGLangLimits"]
