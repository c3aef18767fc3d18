"""The commands of `instar fleet`."""

from instar.extensions.fleet.cli.group import fleet

__all__ = ["fleet"]
