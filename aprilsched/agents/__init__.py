"""How agents and text clients reach the scheduler: sessions, the gateway, their dialects."""
