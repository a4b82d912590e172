"""Sessions: a URL for each rollout, for agents that need not know aprilsched."""

from aprilsched.agents.sessions.harness import Limits, Reply, Session, Sessions

__all__ = ["Limits", "Reply", "Session", "Sessions"]
