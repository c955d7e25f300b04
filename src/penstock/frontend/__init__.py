"""The HTTP server: routes, limits and access control, with a package for each API dialect. Uses an `EngineClient`."""

from penstock.frontend.app import create_app
from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits
from penstock.frontend.served import ServedModel
from penstock.frontend.server import AddressInUse, listen, serve, url_of

__all__ = ["APIError", "AddressInUse", "RequestLimits", "ServedModel", "create_app", "listen", "serve", "url_of"]
