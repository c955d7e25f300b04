"""Checks the metadata of stored things. Independent of the wire."""

from collections.abc import Mapping

from penstock.frontend.errors import invalid

_ENTRIES, _KEY, _VALUE = 16, 64, 512  # as in OpenAI's API; the last two in characters


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the metadata. Raises APIError 400 if it is too large."""
    if not metadata:
        return {}
    if len(metadata) > _ENTRIES:
        raise invalid(f"metadata has {len(metadata)} entries; the limit is {_ENTRIES}: send fewer", "metadata")
    for key, value in metadata.items():
        if len(key) > _KEY or len(value) > _VALUE:
            raise invalid(
                f"metadata has a key of {len(key)} characters with a value of {len(value)}; the limits are {_KEY} and "
                f"{_VALUE}: shorten it",
                "metadata",
            )
    return dict(metadata)
