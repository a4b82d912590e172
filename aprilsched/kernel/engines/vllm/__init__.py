"""The adapter to a vLLM server over HTTP."""

from aprilsched.kernel.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
