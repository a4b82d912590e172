"""The server side of SGLang's HTTP API, for the gateway and the test server."""
