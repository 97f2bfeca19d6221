"""``/v1/models``, health, and metrics: the routes that generate nothing."""

from typing import Literal

import msgspec

from headrace.core.errors import Draining, ModelNotFound, StoreUnavailable, Unavailable
from headrace.gateway.auth import Authenticator
from headrace.gateway.call import Call
from headrace.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from headrace.gateway.models import ModelDirectory, ServedModel


class ModelObject(msgspec.Struct, frozen=True):
    """OpenAI's model object; ``version`` and ``max_model_len`` are additions."""

    id: str
    created: int
    version: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "headrace"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class ListingHandlers:
    """Handlers that only look."""

    def __init__(self, models: ModelDirectory, authenticator: Authenticator, metrics: GatewayMetrics) -> None:
        self._models = models
        self._authenticator = authenticator
        self._metrics = metrics
        self.draining = False

    async def list_models(self, call: Call) -> None:
        """``GET /v1/models``: what is served now. A model with several versions also appears with each of them."""
        data: list[ModelObject] = []
        by_name: dict[str, list[ServedModel]] = {}
        for model in self._models.served():
            by_name.setdefault(model.name, []).append(model)
        for name, versions in by_name.items():
            data.append(_object(name, versions[0]))
            if len(versions) > 1:
                data += [_object(f"{name}@{model.version}", model) for model in versions]
        await call.answer(msgspec.json.encode(ModelList(data)))

    async def get_model(self, call: Call) -> None:
        """``GET /v1/models/{id}``; the id may contain a slash, and may pin a version."""
        reference: str = call.scope["path_params"]["id"]
        try:
            model = self._models.resolve(reference)
        except Unavailable as error:
            raise ModelNotFound(error.message, param="model") from None
        await call.answer(msgspec.json.encode(_object(reference, model)))

    async def healthz(self, call: Call) -> None:
        """``GET /healthz``: the process answers."""
        await call.answer(b'{"status":"ok"}')

    async def readyz(self, call: Call) -> None:
        """``GET /readyz``: a request would be served.

        Raises:
            Draining: the gateway is shutting down.
            Unavailable: no worker serves a model whose tokenizer is loaded.
            StoreUnavailable: the store is away and no key is cached.
        """
        if self.draining:
            raise Draining("The server is shutting down.", retry_after_s=1.0)
        served = self._models.served()
        if not served:
            raise Unavailable("No worker serves any model.", retry_after_s=2.0)
        if not await self._authenticator.probe():
            raise StoreUnavailable("The key store does not answer.", retry_after_s=2.0)
        body = {"status": "ready", "models": sorted({model.name for model in served})}
        await call.answer(msgspec.json.encode(body))

    async def metrics(self, call: Call) -> None:
        """``GET /metrics``."""
        await call.answer(self._metrics.exposition(), content_type=CONTENT_TYPE)


def _object(name: str, model: ServedModel) -> ModelObject:
    return ModelObject(name, int(model.created_at), model.version, model.max_model_len)
