"""Entry point for tools that still call setup.py; everything it says stands in pyproject.toml."""

from setuptools import setup

setup()
