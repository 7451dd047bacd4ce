"""A real browser for the site."""

from tests.browser import browser

__all__ = ["browser"]
