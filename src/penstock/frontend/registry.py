"""The models of a server, by the names that requests use."""

import asyncio

from penstock.frontend.errors import APIError
from penstock.frontend.versions.serving import Serving

_NO_NAMES = ("dummy", "tgi")  # huggingface_hub sends these if its user names no model
_MOST_SHOWN = 8  # models that are listed in an error


class ModelRegistry:
    """Finds the model that a request names. The first model serves requests that name none."""

    def __init__(self, *models: Serving) -> None:
        """Raises ValueError if two of the models have a name in common."""
        self.all = models
        if len(names := self.names()) != len(set(names)):
            raise ValueError(f"two models have the same name: {', '.join(names)}; rename one")

    @property
    def default(self) -> Serving:
        """The model for requests that name none."""
        return self.all[0]

    @property
    def only(self) -> Serving | None:
        """The one model; None if there are several."""
        return self.all[0] if len(self.all) == 1 else None

    def names(self) -> list[str]:
        """Returns every name that requests may use. A model's own name comes before its aliases."""
        return [name for served in self.all for name in served.model.names]

    def find(self, name: str | None) -> Serving:
        """Returns the model that has this name now, since a reload may change names. If `name` is None, returns the
        default model. Raises APIError 404."""
        for served in self.all:
            if name in served.model.names:
                return served
        if name is None or name in _NO_NAMES:
            return self.default
        shown = name if len(name) <= 100 else name[:100] + "..."
        here = ", ".join(repr(served.model.name) for served in self.all[:_MOST_SHOWN])
        message = f"model {shown!r} is not served here; this server has {here}"
        raise APIError(404, message, param="model", code="model_not_found")

    @property
    def healthy(self) -> bool:
        """False once the engine of a model has ended for good."""
        return all(served.healthy for served in self.all)

    async def close(self) -> None:
        """Ends all engines. Streams that are still open end with EngineError. May be called twice."""
        await asyncio.gather(*(served.close() for served in self.all))
