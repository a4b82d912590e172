"""Sessions: agents that know nothing of aprilsched get a URL for each rollout."""

from aprilsched.agents.sessions.harness import Limits, Reply, Session, Sessions

__all__ = ["Limits", "Reply", "Session", "Sessions"]
