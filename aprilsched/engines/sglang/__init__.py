"""The adapter to an SGLang server over HTTP."""

from aprilsched.engines.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine"]
