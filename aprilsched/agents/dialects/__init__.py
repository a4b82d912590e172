"""Client APIs: OpenAI's chats and completions, Anthropic's messages, SGLang's generate.

A dialect parses a body into one value (:class:`~aprilsched.agents.dialects.values.Asked`) and
renders a result (:class:`~aprilsched.agents.dialects.values.Part`), whole or as the events of a
stream. The gateway and the sessions both use them.
"""
