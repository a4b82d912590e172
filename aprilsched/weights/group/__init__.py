"""The torch.distributed group through which a trainer broadcasts, and its collective steps."""
