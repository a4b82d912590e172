"""HTTP to an inference server: connections, bounds, retries and server-sent events."""
