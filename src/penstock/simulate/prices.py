"""The price book: what devices and providers cost. Operators edit it; a plan prints its date."""

from pathlib import Path

import msgspec

from penstock.config.yaml_file import read_yaml

BOOK = Path(__file__).parent / "prices.yaml"
MAX_BYTES = 1 << 20


class DevicePrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of a device for an hour. `spot` is that of one that may be taken back; null: there is none."""

    hour: float
    spot: float | None = None


class ProviderPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of a million tokens."""

    input: float
    output: float


class PriceBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices at a date."""

    date: str
    currency: str
    devices: dict[str, DevicePrice]
    providers: dict[str, ProviderPrice]

    def __post_init__(self) -> None:
        prices = [price for each in self.devices.values() for price in (each.hour, each.spot or 0.0)]
        prices += [price for each in self.providers.values() for price in (each.input, each.output)]
        if any(not 0 <= price <= 1e6 for price in prices):
            raise ValueError("a price is below 0 or above 1e6")

    def hour(self, device: str, *, spot: bool = False) -> float:
        """Returns the price of a device for an hour. Raises ValueError if the book has none."""
        found = self.devices.get(device)
        price = None if found is None else found.spot if spot else found.hour
        if price is None:
            kind = "spot price" if spot else "price"
            raise ValueError(f"the price book has no {kind} of {device}: add it, with --prices FILE")
        return price

    def provider(self, parameters: float) -> ProviderPrice:
        """Returns the price of a provider for models of so many parameters."""
        size = "small" if parameters <= 15e9 else "medium" if parameters <= 50e9 else "large"
        if size not in self.providers:
            raise ValueError(f"the price book has no provider of {size} models: add it, with --prices FILE")
        return self.providers[size]


def load_prices(path: Path = BOOK) -> PriceBook:
    """Returns the price book in a file. Raises ValueError, which names the file and the field."""
    try:
        raw = read_yaml(path, MAX_BYTES, f"--prices {path}")
        if isinstance(raw, dict):
            raw["date"] = str(raw.get("date", ""))
        return msgspec.convert(raw, PriceBook)
    except msgspec.ValidationError as error:
        raise ValueError(f"the price book {path} is wrong: {error}; see --prices") from None
