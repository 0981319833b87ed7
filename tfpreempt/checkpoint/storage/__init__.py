"""Where checkpoints are kept: one small interface, one implementation per file."""
