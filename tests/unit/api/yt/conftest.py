"""A client of the ``yt`` protocol."""

from yt_client import yt  # noqa: F401
