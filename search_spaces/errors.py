"""The branch of the error tree that spaces and configs raise."""

from __future__ import annotations

from workloads.errors import InputError


class ConfigError(InputError):
    """A config that is malformed or names things that its graph does not have."""


class IllegalConfig(InputError):
    """A well-formed config that this graph or GPU cannot run; the text is the reason."""
