"""Engines: the protocol, real SGLang servers, and the embedded engine."""
