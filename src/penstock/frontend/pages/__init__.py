"""The pages for browsers: the playground, the dashboard and the API's description, with the routes that they read."""

from penstock.frontend.describe import Operation
from penstock.frontend.error_body import encode_error
from penstock.frontend.pages import answers
from penstock.frontend.pages.files import show_dashboard, show_docs, show_file, show_playground
from penstock.frontend.pages.server import show_load, show_server, show_usage

OPERATIONS = {
    "show_playground": Operation(summary="The playground", answer="text/html"),
    "show_dashboard": Operation(summary="The dashboard", answer="text/html"),
    "show_docs": Operation(summary="A page that shows this document", answer="text/html"),
    "show_file": Operation(summary="A file of a page", answer="*/*"),
    "show_server": Operation(summary="The model, defaults of sampling parameters, and limits", shape=answers.SERVER),
    "show_load": Operation(summary="Counters, gauges and latencies, as the dashboard reads them", shape=answers.LOAD),
    "show_usage": Operation(summary="What tenants have used in the last 24 hours", shape=answers.USAGE),
}
