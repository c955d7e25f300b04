"""A runtime of MLServer for an ONNX model, with adaptive batching by MLServer. Runs in an environment that has mlserver
and onnxruntime; model-settings.json names it as mlserver_onnx.OnnxRuntime."""

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxRuntime(MLModel):
    async def load(self) -> bool:
        self._session = onnxruntime.InferenceSession(self._settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        array = NumpyCodec.decode_input(payload.inputs[0])
        (made,) = self._session.run(None, {self._session.get_inputs()[0].name: array})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", made)])
