"""What stands in `Engine`'s place on the server of a model that makes embeddings."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mtp.engine.stats import EngineInfo, EngineStats
from mlx_mtp.models.embedding import EmbeddingModel, groups


class EmbeddingEngine:
    """Computes vectors on one thread, and generates nothing."""

    unhealthy_reason = hang_reason = None
    groups = staticmethod(groups)

    def __init__(self, model: EmbeddingModel) -> None:
        self.model, self._stats = model, EngineStats()
        self.threads = ThreadPoolExecutor(1, "mlx-mtp-engine")
        self.info = EngineInfo(
            vocab_size=int(model.config["vocab_size"]),
            eos_token_ids=(),
            max_model_len=model.max_tokens,
            num_draft_tokens=0,
            model_type=model.config["model_type"],
            mtp_enabled=False,
            max_num_seqs=1,
            memory={"weights": model.nbytes, "head": 0},
            embedding_size=model.size,
        )

    def embed(self, rows: list[tuple[int, ...]]) -> np.ndarray:
        """`EmbeddingModel.__call__`, for the thread."""
        self._stats.prompt_tokens += sum(map(len, rows))
        return self.model(rows)

    def stats(self) -> EngineStats:
        return self._stats

    def launch(self) -> None:
        """Compute something: the first step compiles kernels."""
        self.threads.submit(self.embed, [(0,)]).result()

    def stop(self, timeout: float | None) -> bool:
        # mlx aborts the process at exit if a thread has left its streams behind.
        self.threads.submit(mx.clear_streams)
        self.threads.shutdown()
        return True

    def _nothing(self, *_: Any) -> None:
        """There are no answers to start, to wait for, or to end."""

    start = expect_request = resume = cancel = _nothing
