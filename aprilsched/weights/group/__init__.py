"""The torch.distributed group through which a trainer broadcasts: its making, its rounds."""
