"""The wire of Hugging Face's text-generation-inference (TGI)."""

from penstock.frontend.tgi.errors import encode_error
from penstock.frontend.tgi.generate import read_any, read_generate, read_stream
from penstock.frontend.tgi.info import show_info

__all__ = ["encode_error", "read_any", "read_generate", "read_stream", "show_info"]
