"""The version, in the one place that holds it; the build and `regard --version` read it here."""

__version__ = "0.1.0"
