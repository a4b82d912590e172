"""The server side of SGLang's HTTP API: what every program that answers like SGLang needs.

The gateway and the test server (:mod:`aprilsched.testing`) are built on it. It knows neither of
them, no engine and no scheduler: it has the bodies of requests, the forms of refusals and of
streams, keys, and the address to listen at.
"""
