"""The version of EStream that a package names as its maker; read by pyproject.toml too."""

__version__ = "0.1.0"
