"""The adapter to an SGLang server over HTTP."""

from aprilsched.engines.sglang.http_engine import SGLangEngine

__all__ = ["SGLangEngine"]
