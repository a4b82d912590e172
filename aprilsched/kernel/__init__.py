"""What a training must trust: decisions, the asyncio shell, engines, weights and the store."""
