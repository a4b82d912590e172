"""One address in front of a fleet: SGLang's HTTP API, with the scheduler behind it.

A client calls ``/generate`` as on a single SGLang server. Each response is one rollout of the
scheduler: it survives pauses, weight updates and engine failures, and records which version of the
weights sampled each token.
"""

from aprilsched.agents.gateway.server import Gateway
from aprilsched.agents.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
