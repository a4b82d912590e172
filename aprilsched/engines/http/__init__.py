"""HTTP to an inference server: connections, bounds, retries, server-sent events."""
