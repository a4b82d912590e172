"""OpenAI's API in front of a fleet: /v1/completions and /v1/chat/completions.

Text becomes tokens, and tokens become text, by the model's own tokenizer files. Everything else is
as with ``/generate``: each choice is a rollout, and says which version sampled each of its tokens.
"""

from aprilsched.gateway.openai.chat import chat_completions
from aprilsched.gateway.openai.completions import completions

__all__ = ["chat_completions", "completions"]
