"""One address in front of a fleet: SGLang's HTTP API, with the scheduler behind it.

A client sends ``/generate`` as to a single SGLang server. Its response is one rollout of the
scheduler, so it goes on through pauses, new weights and engines that fail, and says which version
of the weights sampled which token.
"""

from aprilsched.agents.gateway.server import Gateway
from aprilsched.agents.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings"]
