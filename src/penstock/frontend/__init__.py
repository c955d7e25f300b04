"""The HTTP server: routes, limits and access control, with a package for each wire. Uses an `EngineClient`."""

from penstock.frontend.app import create_app
from penstock.frontend.errors import APIError
from penstock.frontend.http.server import serve
from penstock.frontend.limits import RequestLimits
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.serving import Serving
