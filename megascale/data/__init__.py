"""Tokens to samples, with NumPy alone: tokenizer, indexed files, sample order, blending, batches."""
