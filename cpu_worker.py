"""vLLM's worker for CPUs, with its weights left where an update can reach them."""

import vllm._custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker


class UnpackedWorker(CPUWorker):
    """oneDNN would pack linear weights at load, out of reach of an update, and for small batches is no faster."""

    def load_model(self, *args, **kwargs) -> None:
        vllm._custom_ops._supports_onednn = False
        super().load_model(*args, **kwargs)
