"""The adapter to an SGLang server over HTTP."""

from aprilsched.kernel.engines.sglang.http_engine import SGLangEngine

__all__ = ["SGLangEngine"]
