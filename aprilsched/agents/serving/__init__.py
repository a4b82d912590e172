"""The server side of SGLang's HTTP API: what the gateway and the test server are built on."""
