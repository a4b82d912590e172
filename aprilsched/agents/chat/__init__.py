"""Chats as text and tokens: the model's tokenizer, OpenAI's bodies, and messages.

The gateway and sessions speak with clients in these forms.
"""
