"""What a `Checkpoint` handle is made of."""
