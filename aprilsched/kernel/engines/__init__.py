"""The protocol of engines, what servers share, and the clients of SGLang and vLLM servers."""
