"""megascale: pretrain GPTs that are bigger than one GPU. Importing this package loads no torch."""

__version__ = "0.1.0"
