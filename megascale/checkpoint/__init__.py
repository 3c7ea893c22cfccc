"""Checkpoints: logical tensors on disk, complete and verified or not loaded. Importing this package loads no torch."""
