"""The adapter to a vLLM server over HTTP."""

from aprilsched.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
